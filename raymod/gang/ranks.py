"""The actors of a gang: asking them all and waiting for them all, and ending them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raymod.errors import RankDiedError, RankError, RankFailure
from raymod.gang.placement import Spot

__all__ = [
    "Member",
    "Outcome",
    "cause_of_death",
    "collect",
    "fetch",
    "host_id",
    "in_step",
    "is_alive",
    "judge",
    "kill",
]

# A rank that raises leaves the others in a collective for good. So long they have to answer too.
GRACE_S = 2.0
# Between two looks at the clock; also how promptly a Ctrl-C is noticed.
_SLICE_S = 0.2
_GONE_S = 5.0
_POLITE_S = 1.0


@dataclass(frozen=True)
class Member:
    """One rank as the driver knows it.

    Attributes:
        rank: Its rank.
        actor: Ray's handle.
        spot: Where it runs.
    """

    rank: int
    actor: Any
    spot: Spot

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.spot.node_address}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of asking all ranks.

    Attributes:
        replies: The answers, by rank.
        failures: What ranks raised.
        deaths: What Ray says of ranks that are gone.
        silent: Ranks that have not answered.
        waited_s: How long they were waited for, in seconds.
    """

    replies: Mapping[int, Any]
    failures: tuple[RankFailure, ...]
    deaths: Mapping[int, str]
    silent: tuple[int, ...]
    waited_s: float


def fetch(ref: Any, member: Member, deadline: float) -> Any:
    """The answer; a RankFailure if it is an exception; a text if the rank is gone."""
    try:
        return ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))
    except RayActorError as error:
        return cause_of_death(error)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        failure = RankFailure.of(cause, rank=member.rank, node=member.spot.node_address)
        return RankFailure(
            rank=failure.rank,
            node=failure.node,
            type_name=failure.type_name,
            message=failure.message,
            traceback=error.traceback_str,
            pickled=failure.pickled,
        )
    except RayError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # the answer arrived and cannot be read here
        return RankFailure.of(error, rank=member.rank, node=member.spot.node_address)


def _wait(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    ready: list[Any] = ray.wait(list(refs), num_returns=1, timeout=timeout_s)[0]
    return ready


def collect(
    refs: Mapping[Any, Member],
    *,
    deadline: float,
    look: Callable[[], None] = lambda: None,
    wait: Callable[[Sequence[Any], float], list[Any]] = _wait,
    fetch: Callable[[Any, Member, float], Any] = fetch,
) -> Outcome:
    """Wait for the answers of all ranks, or for what makes waiting pointless.

    Waiting on all is what tells the first trouble, whichever rank has it. It ends early when a
    rank is gone, or when some raised and the others do not follow within `GRACE_S`.

    Args:
        refs: Ray's promise of each member's answer.
        deadline: Limit, on the monotonic clock.
        look: Called between waits; may raise.
        wait: `wait(refs, timeout_s)` gives those whose answer is there, as soon as there is one.
        fetch: `fetch(ref, member, deadline)` gives the answer, or what came instead.
    """
    began = time.monotonic()
    pending = dict(refs)
    replies: dict[int, Any] = {}
    failures: list[RankFailure] = []
    deaths: dict[int, str] = {}
    while pending and not deaths:
        now = time.monotonic()
        if now >= deadline:
            break
        ready = wait(list(pending), min(_SLICE_S, deadline - now))
        look()
        for ref in ready:
            member = pending.pop(ref)
            answer = fetch(ref, member, deadline)
            if isinstance(answer, str):
                deaths[member.rank] = answer
                continue
            replies[member.rank] = answer
            failure = answer if isinstance(answer, RankFailure) else _failure(answer)
            if failure is not None:
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return Outcome(
        replies=replies,
        failures=tuple(failures),
        deaths=deaths,
        silent=tuple(sorted(member.rank for member in pending.values())),
        waited_s=time.monotonic() - began,
    )


def judge(outcome: Outcome, members: Sequence[Member]) -> RankError | RankDiedError | None:
    """The error that an outcome amounts to; None if all answered, or are merely late.

    A rank's own error goes before another's death, and that before what ranks say that only
    noticed it.
    """
    own = [failure for failure in outcome.failures if not failure.secondary]
    if outcome.deaths and not own:
        rank, cause = min(outcome.deaths.items())
        gone = next(member for member in members if member.rank == rank)
        return RankDiedError(f"{gone} is gone: {cause}")
    if outcome.failures:
        return RankError.from_failures(outcome.failures)
    return None


def in_step(outcome: Outcome, world_size: int) -> bool:
    """Whether the ranks can go on although some raised: nobody waits for another in a collective.

    So it is if all had done their work and only an answer could not be sent; and if a wrong input
    raised on all ranks alike, and each group's members have begun equally many collectives.
    """
    replies = outcome.replies
    if len(replies) != world_size or any(failure.secondary for failure in outcome.failures):
        return False
    if all(getattr(reply, "done", False) for reply in replies.values()):
        return True
    kinds = {failure.type_name for failure in outcome.failures}
    return len(outcome.failures) == world_size and len(kinds) == 1 and _same_steps(replies)


def _same_steps(replies: Mapping[int, Any]) -> bool:
    counts: dict[Any, list[int]] = {}
    for rank, reply in replies.items():
        steps = getattr(reply, "steps", None)
        if steps is None:
            return False
        own: dict[Any, list[int]] = {}
        for ranks, count in steps:
            own.setdefault(ranks, []).append(count)
        for ranks, sequence in own.items():
            if rank in ranks and counts.setdefault(ranks, sequence) != sequence:
                return False
    return True


def kill(members: Sequence[Member], *, host: str) -> None:
    """End the actors, and wait until those whose processes can be seen from here are gone."""
    if ray.is_initialized():
        for member in members:
            with suppress(Exception):  # gone already, or Ray is
                ray.kill(member.actor, no_restart=True)
    began = time.monotonic()
    left = [m.spot.pid for m in members if host and m.spot.host == host]
    while left and time.monotonic() < began + _GONE_S:
        left = [pid for pid in left if is_alive(pid)]
        if left and time.monotonic() > began + _POLITE_S:
            for pid in filter(_is_worker, left):  # stopped, or stuck: Ray asks these in vain
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if left:
            time.sleep(0.02)


def host_id() -> str:
    """What two processes have in common that see one another's process ids; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return os.readlink("/proc/self/ns/pid") + file.read().strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine still runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _is_worker(pid: int) -> bool:
    """Whether the process is one of Ray's, and not another that got its number since."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"ray::")
    except OSError:
        return False


def _failure(answer: Any) -> RankFailure | None:
    failure = getattr(answer, "failure", None)
    return failure if isinstance(failure, RankFailure) else None


def cause_of_death(error: RayActorError) -> str:
    """Ray's explanation on one line, without the actor's internal names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    internal = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    return " ".join(line for line in lines if not line.startswith(internal))
