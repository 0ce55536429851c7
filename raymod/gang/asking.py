"""One request at a time to the ranks of a gang, and what a failure ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from raymod.calls import Packed, pack
from raymod.errors import (
    CallTimeoutError,
    ConfigError,
    GangError,
    RankDiedError,
    RankError,
    StubClosedError,
)
from raymod.gang.interrupts import interrupt_deferred
from raymod.gang.ranks import Member, Outcome, in_step, judge
from raymod.gang.start import Existing
from raymod.gang.telling import failed_before
from raymod.transport import CannotOpenError
from raymod.worker import Reply, Worker

__all__ = ["Asking", "request"]

logger = logging.getLogger(__name__)

_TURN_SLICE_S = 0.5
_STEP_TEST_S = 5.0
_SILENT_S = 0.5


@dataclass(frozen=True)
class _Seen:
    """What was last seen of a gang.

    Attributes:
        failure: What ended it, if anything did.
        closing: Whether `close` was called.
        closed: Whether everything is gone.
    """

    failure: GangError | None = None
    closing: bool = False
    closed: bool = False


class Asking:
    """What asks the ranks that exist.

    Attributes:
        existing: The ranks, and what belongs to them.
        seen: What was last seen of them.
        turn: Held by the thread whose turn it is. What is done once the ranks were started anew is
            done in the turn of the new start.
        asked_at: When the last request was with all ranks, on the monotonic clock.
    """

    def __init__(self, existing: Existing, call_timeout_s: float) -> None:
        self.existing = existing
        self.seen = _Seen()
        self.turn = threading.RLock()
        self.asked_at = 0.0
        self._call_timeout_s = call_timeout_s
        # Ray's promises of a call that was interrupted; the ranks are still at it
        self._flight: dict[Any, Member] = {}

    def go_on_with(self, existing: Existing) -> None:
        """Go on with new ranks, which nothing has happened to."""
        self.existing, self._flight = existing, {}
        self.seen = replace(self.seen, failure=None)

    def is_stuck(self) -> bool:
        """Whether the ranks are still at a call that was interrupted."""
        if not self._flight or not self.turn.acquire(blocking=False):
            return False
        self.turn.release()
        return True

    def check_open(self) -> None:
        """Refuse a request that nobody would answer.

        Raises:
            StubClosedError: The gang was closed, or this is not its process.
            GangFailedError: It has ended before.
        """
        if self.existing.cleanup.is_forked():
            raise StubClosedError(
                "this process was forked off the one that the ranks belong to: call them there, "
                "or wrap the module here anew"
            )
        if self.seen.closing:
            raise StubClosedError("the gang was closed; its ranks are gone")
        if self.seen.failure is None and not self.existing.session.is_live():
            self.fail(RankDiedError("Ray was shut down in this process, and the ranks with it"))
        if self.seen.failure is not None:
            raise failed_before(self.seen.failure)

    @contextmanager
    def my_turn(self, first: Callable[[], None]) -> Iterator[None]:
        """One request at a time, so that every rank sees the same order.

        Args:
            first: Done in the turn before anything else.
        """
        while not self.turn.acquire(timeout=_TURN_SLICE_S):
            if self.seen.closing:
                self.check_open()
        try:
            first()
            self.check_open()
            self._finish_interrupted()
            yield
        finally:
            self.turn.release()

    def exchange(self, ask: Callable[[Member], Any], limit_s: float) -> list[Reply]:
        """Ask all ranks and settle what comes of it."""
        with interrupt_deferred():  # asked by half, the ranks that were would wait for the others
            self._flight = {ask(member): member for member in self.existing.members}
            self.asked_at = time.monotonic()
        outcome = self.existing.lines.collect(
            self._flight, deadline=time.monotonic() + limit_s, look=self._check_not_closed
        )
        self._flight = {}
        self._settle(outcome)
        return [outcome.replies[member.rank] for member in self.existing.members]

    def _finish_interrupted(self) -> None:
        """Wait for what the ranks are still doing for a call that was interrupted."""
        if not self._flight:
            return
        began, limit_s = time.monotonic(), self._call_timeout_s
        is_said = False

        def look() -> None:
            nonlocal is_said
            self._check_not_closed()
            if not is_said and time.monotonic() - began >= _SILENT_S:
                is_said = True
                logger.warning(
                    "waiting for the ranks to finish the call that was interrupted, at most %g s",
                    limit_s,
                )

        outcome = self.existing.lines.collect(self._flight, deadline=began + limit_s, look=look)
        self._flight = {}
        try:
            self._settle(outcome)
        except RankError:
            if self.seen.failure is not None:
                raise

    def _settle(self, outcome: Outcome) -> None:
        error: GangError | None = judge(outcome, self.existing.members)
        if error is None and outcome.silent:
            error = self._late(outcome)
        if error is None:
            return
        if self.seen.closing:
            raise StubClosedError("the gang was closed during the call") from error
        if not (isinstance(error, RankError) and self._is_in_step(outcome)):
            self.fail(error)
        raise error

    def _is_in_step(self, outcome: Outcome) -> bool:
        """Whether the ranks, all of which raised alike, can go on; tried with a collective."""
        if not in_step(outcome, len(self.existing.members)):
            return False
        limit = time.monotonic() + _STEP_TEST_S
        lines = self.existing.lines
        with interrupt_deferred():
            asked = {
                lines.ask(m, "answer", "self_test", _STEP_TEST_S): m for m in self.existing.members
            }
        tested = lines.collect(asked, deadline=limit)
        return judge(tested, self.existing.members) is None and not tested.silent

    def _late(self, outcome: Outcome) -> CallTimeoutError:
        late = ", ".join(str(m) for m in self.existing.members if m.rank in outcome.silent)
        return CallTimeoutError(
            f"no answer from {late} within {outcome.waited_s:.1f} s; the gang was ended. A longer "
            f"limit is set with GangConfig(call_timeout_s=...)"
        )

    def fail(self, error: GangError) -> None:
        """End the ranks because of `error`."""
        self.seen = replace(self.seen, failure=error)
        self.existing.ranks.run()

    def _check_not_closed(self) -> None:
        if self.seen.closed:
            raise StubClosedError("the gang was closed during the call")

    def received(self, replies: list[Reply]) -> list[Packed]:
        """What the ranks sent; in this turn, as their memory is used again in the next."""
        receive = self.existing.lines.receive
        try:
            return [receive(reply.rank, reply.parcel) for reply in replies if reply.parcel]
        except CannotOpenError as error:
            if self.seen.closing:
                raise StubClosedError("the gang was closed during the call") from error
            gone = RankDiedError(f"a rank ended before what it sent could be read: {error}")
            self.fail(gone)
            raise gone from error


def request(
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    reply_rank: int | None,
    world_size: int,
) -> Packed:
    """What every rank is asked to run, packed; see `Gang.call_all`.

    Raises:
        ConfigError: There is no such method or rank.
        PackError: Part of it cannot travel.
    """
    if isinstance(method, str) and (method.startswith("_") or not hasattr(Worker, method)):
        raise ConfigError(f"a rank has no method {method!r}; give a function of the worker")
    if reply_rank is not None and not 0 <= reply_rank < world_size:
        ranks = f"are {world_size} ranks" if world_size > 1 else "is 1 rank"
        raise ConfigError(f"reply_rank={reply_rank}: there {ranks}")
    return pack((method, args, dict(kwargs)), what="argument", as_it_is=True)
