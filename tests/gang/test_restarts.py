"""Ranks that died are started anew, with all that they had, and the call is repeated."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import raymod
from raymod.errors import GangError, GangFailedError, GangStartError, RankDiedError, StubClosedError
from raymod.gang import Gang
from tests.conftest import RayForTests
from tests.gang.helpers import is_running, nap, pids, start, wait_for

pytestmark = [
    pytest.mark.gang,
    pytest.mark.filterwarnings("ignore:batch_degree=2:UserWarning"),
]

X = torch.tensor(2.0)


@pytest.fixture
def gang(ray_session: RayForTests) -> Iterator[Gang]:
    with start(max_restarts=1) as gang:
        yield gang


def kill(gang: Gang, rank: int = 1) -> None:
    os.kill(pids(gang)[rank], signal.SIGKILL)


def test_between_calls_in_a_call_and_once_too_often(
    gang: Gang, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="raymod")
    assert float(gang.call((X,), {})) == 24
    before = pids(gang)
    kill(gang)
    assert float(gang.call((X,), {})) == 24
    after = pids(gang)
    assert not set(before) & set(after)
    assert wait_for(lambda: not any(map(is_running, before)))
    (message,) = [r.getMessage() for r in caplog.records if "started anew" in r.getMessage()]
    assert "rank 1" in message
    assert "(1 of max_restarts=1)" in message
    kill(gang, 0)
    with pytest.raises(RankDiedError, match="rank 0"):
        gang.call((X,), {})
    for _ in range(2):
        with pytest.raises(GangFailedError, match="earlier failure"):
            gang.call((X,), {})
    gang.restart()
    assert float(gang.call((X,), {})) == 24
    assert all(map(is_running, pids(gang)))
    gang.close()
    with pytest.raises(StubClosedError):
        gang.restart()


def test_in_a_call_that_several_threads_wait_for(gang: Gang) -> None:
    """Each gets its own answer, from ranks that are started anew once."""
    before = pids(gang)
    answers: dict[int, float] = {}

    def call(number: int) -> None:
        kwargs = {"mode": "sleep", "rank": -1, "seconds": 2.0} if number == 0 else {}
        answers[number] = float(gang.call((torch.tensor(float(number)),), kwargs))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    kill(gang)
    for thread in threads:
        thread.join(60)
    assert answers == {0: 0.0, 1: 12.0, 2: 24.0}
    assert not set(before) & set(pids(gang))
    assert gang.restarts.number == 1


def test_what_a_function_was_doing_is_not_repeated(gang: Gang) -> None:
    """Nobody knows whether it may be done twice; what comes after it finds new ranks."""
    timer = threading.Timer(1.0, lambda: kill(gang))
    timer.start()
    with pytest.raises(RankDiedError):
        gang.call_all(nap, 20.0)
    timer.join()
    assert gang.call_all(nap, 0.0) == [0, 1]
    assert float(gang.call((X,), {})) == 24


def test_closing_while_ranks_are_started_anew(gang: Gang) -> None:
    kill(gang)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            gang.call((X,), {})
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(1.0)
    gang.close()
    thread.join(60)
    assert [type(error) for error in failed] == [StubClosedError]
    assert wait_for(lambda: not any(map(is_running, pids(gang))))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_ranks_that_did_not_get_all_changes_do_not_answer(gang: Gang, error: Any) -> None:
    def replay(gang: Gang) -> None:
        raise error("in the middle of it")

    gang.on_rebuilt = replay
    kill(gang)
    with pytest.raises(error, match="in the middle of it"):
        gang.call((X,), {})
    with pytest.raises(GangFailedError, match="did not get all that had changed"):
        gang.call((X,), {})
    gang.on_rebuilt = None
    gang.restart()
    assert float(gang.call((X,), {})) == 24


def test_a_new_start_that_fails_says_why(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise GangStartError("no room") from MemoryError("full")

    monkeypatch.setattr("raymod.gang.restarts.start", fail)
    kill(gang)
    with pytest.raises(GangStartError, match="no room") as caught:
        gang.call((X,), {})
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(GangFailedError, match="RankDiedError: rank 1"):
        gang.call((X,), {})


class Drawing(nn.Module):
    """Draws a number in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + torch.rand(())


def drawn(death_after: int | None, **options: Any) -> list[float]:
    module, x = Drawing(), torch.zeros(1, 3)
    with torch.no_grad(), raymod.wrap(module, workers=2, **options) as stub:
        found = []
        for number in range(4):
            if number == death_after:
                os.kill(stub.report.ranks[0].pid, signal.SIGKILL)
            found.append(float(stub(x)[0, 0]))
        assert stub.gang.restarts.number == (death_after is not None)
        return found


@pytest.mark.filterwarnings("ignore:Drawing does not say:UserWarning")
def test_random_numbers_go_on_as_if_nothing_had_happened(ray_session: RayForTests) -> None:
    undisturbed = drawn(None)
    assert len(set(undisturbed)) == 4
    assert drawn(2) == undisturbed


@pytest.mark.filterwarnings("ignore:Drawing does not say:UserWarning")
def test_weights_that_only_the_ranks_had_are_gone(ray_session: RayForTests) -> None:
    x = torch.zeros(1, 3)
    with torch.no_grad(), raymod.wrap(Drawing(), workers=2, keep_local=False) as stub:
        os.kill(stub.report.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(RankDiedError):
            stub(x)
        with pytest.raises(GangError, match=r"cannot be started anew.*keep_local=False"):
            stub.restart()
        with pytest.raises(raymod.WeightsError, match="gone"):
            raymod.unwrap(stub)


def test_it_can_be_switched_off(ray_session: RayForTests) -> None:
    with start() as gang:  # the tests' own default is 0
        kill(gang)
        with pytest.raises(RankDiedError):
            gang.call((X,), {})
        assert gang.restarts.number == 0
    with pytest.raises(raymod.ConfigError, match="max_restarts"):
        raymod.GangConfig(max_restarts=-1)
