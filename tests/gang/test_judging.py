"""What the answers of all ranks amount to: no Ray."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from raymod.errors import RankDiedError, RankError, RankFailure
from raymod.gang.cleanup import Cleanup
from raymod.gang.interrupts import interrupt_deferred
from raymod.gang.placement import Spot
from raymod.gang.ranks import Member, Outcome, in_step, judge
from raymod.gang.telling import first_line
from raymod.worker import Reply

SPOT = Spot(slot=0, node_id="n", node_address="10.0.0.1", gpu_ids=(), pid=1, host="")
MEMBERS = [Member(rank, None, SPOT) for rank in range(2)]
GONE = RuntimeError("Connection closed by peer [10.0.0.2]:1234")


def failure(rank: int, error: Exception) -> RankFailure:
    return RankFailure.of(error, rank=rank, node="10.0.0.1")


def outcome(
    *answers: Exception | int | None, deaths: dict[int, str] | None = None, done: bool = False
) -> Outcome:
    """Of each rank: what it raised, how often it gathered before it raised, or None for silence."""
    replies: dict[int, Any] = {}
    for rank, answer in enumerate(answers):
        if isinstance(answer, Exception):
            replies[rank] = Reply(
                rank=rank, failure=failure(rank, answer), steps=(((0, 1), 5),), done=done
            )
        elif answer is not None:
            replies[rank] = Reply(rank=rank, value=answer)
    return Outcome(
        replies=replies,
        failures=tuple(r.failure for r in replies.values() if r.failure),
        deaths=deaths or {},
        silent=tuple(r for r, a in enumerate(answers) if a is None and r not in (deaths or {})),
        waited_s=1.0,
    )


def with_steps(*steps: Any) -> Outcome:
    """All ranks raised alike, after so many collectives."""
    both = outcome(*(ValueError("x") for _ in steps))
    replies = {
        rank: Reply(rank=rank, failure=reply.failure, done=False, steps=steps[rank])
        for rank, reply in both.replies.items()
    }
    return Outcome(replies=replies, failures=both.failures, deaths={}, silent=(), waited_s=1.0)


def test_all_answered() -> None:
    assert judge(outcome(1, 2), MEMBERS) is None


def test_the_first_own_error_is_shown() -> None:
    error = judge(outcome(GONE, ValueError("mine")), MEMBERS)
    assert isinstance(error, RankError)
    assert isinstance(error, ValueError)
    assert error.rank == 1


def test_a_death_goes_before_what_others_noticed_of_it() -> None:
    error = judge(outcome(GONE, None, deaths={1: "killed by signal 9"}), MEMBERS)
    assert isinstance(error, RankDiedError)
    assert "rank 1 on node 10.0.0.1 is gone: killed by signal 9" in str(error)


def test_an_own_error_goes_before_a_death() -> None:
    error = judge(outcome(ValueError("mine"), None, deaths={1: "killed"}), MEMBERS)
    assert isinstance(error, ValueError)


def test_all_raised_alike_at_the_same_point() -> None:
    assert in_step(with_steps((((0, 1), 5),), (((0, 1), 5),)), 2)
    assert in_step(with_steps((), ()), 2)


@pytest.mark.parametrize(
    "found",
    [
        with_steps((((0, 1), 5),), (((0, 1), 6),)),  # one is a collective ahead
        with_steps((((0, 1), 5), ((0, 1), 2)), (((0, 1), 5), ((0, 1), 3))),  # in a second group
        with_steps(None, None),  # torch does not say
        outcome(ValueError("x"), LookupError("y")),
        outcome(ValueError("x"), 1),  # the other is through
        outcome(ValueError("x"), None),  # the other is stuck
        outcome(GONE, GONE),
        outcome(ValueError("x"), None, deaths={1: "killed"}),
    ],
)
def test_not_in_step(found: Outcome) -> None:
    assert not in_step(found, 2)


def test_an_answer_that_cannot_be_sent_is_no_harm() -> None:
    assert in_step(outcome(TypeError("cannot pickle"), 1, done=True), 2)
    assert not in_step(outcome(TypeError("cannot pickle"), None, done=True), 2)


def test_a_long_error_is_cut_between_words() -> None:
    words = " ".join(f"word{n}" for n in range(100))
    text = first_line(ValueError(f"{words}\nTraceback"))
    assert 200 < len(text) <= 300
    assert text.endswith(" ...")
    assert words.startswith(text.removesuffix("..."))
    assert first_line(ValueError("short\nTraceback")) == "short"


def test_clean_up_runs_backwards_and_once_and_all_of_it() -> None:
    seen: list[str] = []
    cleanup = Cleanup()
    for name in ("ray", "group", "actors"):
        cleanup.add(seen.append, name)
    cleanup.add(lambda: 1 / 0)
    cleanup.add(seen.append, "last")
    threads = [threading.Thread(target=cleanup.run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == ["last", "actors", "group", "ray"]


def test_clean_up_does_not_run_in_a_forked_process() -> None:
    cleanup = Cleanup()
    cleanup.add(os._exit, 7)
    pid = os.fork()
    if pid == 0:
        cleanup.run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    cleanup._steps.pop_all()


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - that it runs to its end is the point
        with interrupt_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            done = True
        done = False
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_have_no_interrupts_to_hold_back() -> None:
    held: list[Any] = []

    def work() -> None:
        with interrupt_deferred():
            held.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert held == [signal.default_int_handler]
