"""Calls to a gang that works, one shared by all tests here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raymod.errors import ConfigError, PackError, RankError
from raymod.gang import Gang
from tests.conftest import RayForTests
from tests.gang.helpers import misbehave, nap, start, who

pytestmark = [
    pytest.mark.gang,
    # a scalar has no batch to divide
    pytest.mark.filterwarnings("ignore:batch_degree=2:UserWarning"),
]

X = torch.tensor(2.0)


@pytest.fixture(params=["shared", "ray"], scope="module")
def transport(request: pytest.FixtureRequest) -> str:
    """The way that calls take. Per module, so that the tests of each way come together."""
    return str(request.param)


@pytest.fixture
def gang(ray_for_tests: RayForTests, transport: str) -> Gang:
    gang: Gang = ray_for_tests.gang(f"calls-{transport}", lambda: start(transport=transport))
    assert bool(gang.report.near) == (transport == "shared")
    return gang


def check(gang: Gang) -> None:
    """It works, and all ranks take part."""
    assert float(gang.call((X,), {})) == 24.0


def test_positional_and_named_arguments(gang: Gang) -> None:
    check(gang)
    assert float(gang.call((), {"x": torch.tensor(-1.0)})) == -12.0


def test_what_all_ranks_raise_alike_leaves_the_gang_as_it_is(gang: Gang) -> None:  # R90
    pids = [info.pid for info in gang.report.ranks]
    for _ in range(3):
        with pytest.raises(LookupError, match="the probe was asked to raise") as caught:
            gang.call((X, "raise"), {"rank": -1})
        assert isinstance(caught.value, RankError)
        assert [failure.rank for failure in caught.value.failures] == [0, 1]
        assert "inputs: float32[], 'raise', rank=-1" in str(caught.value)
        assert "in misbehave" in caught.value.remote_traceback
        check(gang)
    assert gang.call_all(lambda worker: os.getpid()) == pids


def test_an_output_that_cannot_travel_leaves_the_gang_as_it_is(gang: Gang) -> None:
    with pytest.raises(PackError, match="an open file"):
        gang.call((X, "unpicklable"), {"rank": -1})
    check(gang)


def test_an_argument_that_cannot_travel_is_refused_here(gang: Gang) -> None:
    with pytest.raises(PackError, match="generator"):
        gang.call((X,), {"generator": torch.Generator()})
    with pytest.raises(PackError, match=r"argument args\[0\] is a torch.Tensor.* not dense"):
        gang.call((torch.eye(3, dtype=torch.int64).to_sparse(),), {})
    check(gang)


def test_replies_of_all_ranks(gang: Gang) -> None:
    assert gang.call_all(who) == [0, 1]
    assert gang.call_all(who, reply_rank=1) == [1]
    assert gang.call_all("health", reply_rank=0)[0].calls > 0
    offset = torch.tensor([3, 4])
    replies = gang.call_all(
        lambda worker, add, *, times: worker.rank * times + add, offset, times=2
    )
    assert [reply.tolist() for reply in replies] == [[3, 4], [5, 6]]


def test_only_the_asked_rank_sends_its_reply(gang: Gang) -> None:
    def reply(worker: Any) -> Any:
        return open(os.devnull) if worker.rank == 0 else "fine"

    assert gang.call_all(reply, reply_rank=1) == ["fine"]
    with pytest.raises(PackError):
        gang.call_all(reply)
    check(gang)


def test_what_cannot_be_asked_of_a_rank(gang: Gang) -> None:
    with pytest.raises(ConfigError, match="no method 'nothing'"):
        gang.call_all("nothing")
    with pytest.raises(ConfigError, match="no method '_failed'"):
        gang.call_all("_failed")
    with pytest.raises(ConfigError, match="reply_rank=2: there are 2 ranks"):
        gang.call_all(who, reply_rank=2)


def test_health_answers_during_a_call(gang: Gang) -> None:  # R124
    thread = threading.Thread(target=gang.call, args=((X, "sleep"), {"rank": -1, "seconds": 3.0}))
    thread.start()
    time.sleep(1.0)
    began = time.monotonic()
    busy = gang.health()
    took = time.monotonic() - began
    thread.join()
    assert took < 1.5
    assert [health.state for health in busy] == ["forward", "forward"]
    assert all(health.ok and 0 < health.busy_s < 5 for health in busy)
    assert [health.state for health in gang.health()] == ["idle", "idle"]


def test_threads_take_turns(gang: Gang) -> None:  # R143
    """Mixed up, the sums over ranks would be of different calls."""
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        x = torch.tensor(float(number))
        found[number] = [float(gang.call((x,), {})) for _ in range(15)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [number * 12.0] * 15 for number in range(4)}


def interrupt_after(seconds: float, work: Callable[[], Any]) -> float:
    """Seconds from Ctrl-C to control being back."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        return time.monotonic() - sent[0]
    finally:
        timer.join()


def test_after_an_interrupt_the_gang_goes_on(gang: Gang, caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    took = interrupt_after(0.5, lambda: gang.call((X, "sleep"), {"rank": 1, "seconds": 3.0}))
    assert took < 1.0
    again = interrupt_after(0.3, lambda: check(gang))  # twice is not worse
    assert again < 1.0
    check(gang)
    assert time.monotonic() - began >= 3.0
    # at the level that is shown where nobody has set up logging
    said = [record for record in caplog.records if "interrupted" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    assert "waiting for the ranks to finish the call" in said[0].getMessage()


def test_an_interrupted_call_may_have_raised_on_all_ranks(gang: Gang) -> None:
    def late_error(worker: Any) -> None:
        time.sleep(1.5)
        misbehave("raise", 0)

    interrupt_after(0.5, lambda: gang.call_all(late_error))
    check(gang)


def test_a_call_after_an_interrupted_one_has_its_own_limit(gang: Gang) -> None:
    interrupt_after(0.3, lambda: gang.call_all(nap, 2.0))
    assert gang.call_all(nap, 0.0, timeout_s=1.0) == [0, 1]
