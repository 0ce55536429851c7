"""How gangs fail and end. Each test ends its own."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util import placement_group_table

from raymod.errors import (
    CallTimeoutError,
    GangFailedError,
    RankDiedError,
    RankError,
    StubClosedError,
)
from raymod.gang import Gang
from tests.conftest import RayForTests
from tests.gang.helpers import (
    Probe,
    is_running,
    nap,
    pids,
    placement_groups,
    start,
    stop_here,
    wait_for,
    who,
)

pytestmark = [
    pytest.mark.gang,
    # a scalar has no batch to divide
    pytest.mark.filterwarnings("ignore:batch_degree=2:UserWarning"),
]

X = torch.tensor(2.0)
both_ways = pytest.mark.parametrize("gang", ["shared", "ray"], indirect=True)


@pytest.fixture
def gang(ray_session: RayForTests, request: pytest.FixtureRequest) -> Iterator[Gang]:
    """A gang of its own; the test is to end it, and nothing of it may be left."""
    free = ray.available_resources().get("CPU", 0)
    gang = start(close_timeout_s=2, transport=getattr(request, "param", "shared"))
    yield gang
    numbers = pids(gang)
    gang.close()
    assert not any(is_running(pid) for pid in numbers)
    table = placement_group_table(gang._asking.existing.bundles.group)
    assert table["state"] == "REMOVED"
    assert wait_for(lambda: ray.available_resources().get("CPU", 0) >= free)


def check_failed(gang: Gang, first: type[Exception]) -> None:
    """Every later request raises at once, and says why; no process is left stuck."""
    assert not any(is_running(pid) for pid in pids(gang))
    for request in (
        lambda: gang.call((X,), {}),
        lambda: gang.call_all(who),
        gang.health,
    ):
        began = time.monotonic()
        with pytest.raises(GangFailedError, match=first.__name__) as caught:
            request()
        assert time.monotonic() - began < 0.5
        assert isinstance(caught.value.__cause__, first)


@both_ways
def test_a_rank_dies_in_a_call(gang: Gang) -> None:  # R120
    began = time.monotonic()
    with pytest.raises(RankDiedError) as caught:
        gang.call((X, "exit"), {})
    assert time.monotonic() - began < 4
    text = str(caught.value)
    assert f"rank 1 on node {gang.report.ranks[1].node_address} is gone" in text
    assert "worker process has died" in text
    check_failed(gang, RankDiedError)


def test_a_rank_dies_between_calls(gang: Gang) -> None:  # R120
    assert float(gang.call((X,), {})) == 24.0
    os.kill(pids(gang)[1], signal.SIGKILL)
    assert wait_for(lambda: not is_running(pids(gang)[1]))
    gone = gang.health(timeout_s=3)
    assert [health.ok for health in gone] == [True, False]
    began = time.monotonic()
    with pytest.raises(RankDiedError, match="rank 1 on node"):
        gang.call((X,), {})
    assert time.monotonic() - began < 2.5
    check_failed(gang, RankDiedError)


def test_one_rank_raises(gang: Gang) -> None:  # R121
    began = time.monotonic()
    with pytest.raises(LookupError, match="the probe was asked to raise") as caught:
        gang.call((X, "raise"), {})
    assert time.monotonic() - began < 6
    assert isinstance(caught.value, RankError)
    assert caught.value.rank == 1
    check_failed(gang, RankError)


@both_ways
def test_ranks_hang(gang: Gang) -> None:  # R122, R123
    began = time.monotonic()
    with pytest.raises(CallTimeoutError, match=r"no answer from rank 1 on node \S+ within 1\.\d s"):
        gang.call_all(nap, 60.0, rank=1, timeout_s=1.0)
    assert time.monotonic() - began < 4
    check_failed(gang, CallTimeoutError)


def test_closing_ends_what_is_stopped_or_dead(gang: Gang) -> None:  # R127
    os.kill(pids(gang)[0], signal.SIGKILL)
    os.kill(pids(gang)[1], signal.SIGSTOP)
    assert wait_for(lambda: not is_running(pids(gang)[0]))
    dead, silent = gang.health(timeout_s=1)
    assert "gone: " in dead.state
    assert (silent.ok, silent.state) == (False, "silent for 1 s")
    began = time.monotonic()
    gang.close()
    assert time.monotonic() - began < 8
    with pytest.raises(StubClosedError):
        gang.health()


@both_ways
def test_closing_during_a_call(gang: Gang) -> None:  # R126
    raised: list[BaseException] = []

    def call() -> None:
        try:
            gang.call((X, "sleep"), {"rank": -1})
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(1.0)
    began = time.monotonic()
    gang.close()
    assert time.monotonic() - began < 6
    thread.join(5)
    assert [type(error) for error in raised] == [StubClosedError]
    assert gang.closed
    gang.close()
    with pytest.raises(StubClosedError):
        gang.call((X,), {})


def test_closing_lets_a_short_call_finish(gang: Gang) -> None:
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.extend(gang.call_all(nap, 1.0)))
    thread.start()
    time.sleep(0.5)
    gang.close()
    thread.join(5)
    assert replies == [0, 1]


def test_a_gang_that_nobody_holds_ends(ray_session: RayForTests) -> None:
    gang = start(ranks=1)
    numbers = pids(gang)
    group = gang._asking.existing.bundles.group
    del gang
    gc.collect()
    assert wait_for(lambda: not any(is_running(pid) for pid in numbers))
    assert wait_for(lambda: placement_group_table(group)["state"] == "REMOVED")


def test_ctrl_c_while_it_starts(ray_session: RayForTests, tmp_path: Path) -> None:
    def load() -> Probe:
        Path(tmp_path, str(os.getpid())).touch()
        time.sleep(600)
        return Probe()

    def interrupt() -> None:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2, limit_s=60)
        os.kill(os.getpid(), signal.SIGINT)

    before = placement_groups()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        start(load=load)
    thread.join()
    numbers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(numbers) == 2
    assert not any(is_running(pid) for pid in numbers)
    assert placement_groups() == before


def test_an_interrupted_call_that_ended_badly_is_told_by_the_next(gang: Gang) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        gang.call_all(_exit_later)
    timer.join()
    with pytest.raises(RankDiedError, match="rank 0"):
        gang.call((X,), {})
    check_failed(gang, RankDiedError)


def _exit_later(worker: Any) -> None:
    time.sleep(1.5)
    stop_here(worker, "exit", 0)
    time.sleep(60)
