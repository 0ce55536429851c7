"""A gang that is up: calls, health, and its end."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from raymod.calls import Packed, pack, unpack
from raymod.calls.joining import join
from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.errors import (
    CallTimeoutError,
    ConfigError,
    GangError,
    GangFailedError,
    RankDiedError,
    RankError,
    StubClosedError,
)
from raymod.gang.health import ask_health
from raymod.gang.interrupts import interrupt_deferred
from raymod.gang.progress import Progress
from raymod.gang.ranks import Member, Outcome, in_step, judge
from raymod.gang.reports import CallReport, GangReport
from raymod.gang.start import Asked, Existing, Undecided, start
from raymod.gang.telling import Warner, first_line
from raymod.transport import CannotOpenError, RayTransport, Transport
from raymod.weights import Offer
from raymod.worker import Health, Reply, Worker

__all__ = ["Gang"]

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


class Gang:
    """The ranks of one module, in rank order, as one thing. Made by `Gang.start`.

    One fate: when a rank dies or hangs, or raises while others do not, the whole gang is ended
    and every later call raises at once. Safe to use from several threads, which take turns.

    Attributes:
        report: How it was started.
        last_call: Where the time and the bytes of the last call went; None before it.
        on_rebuilt: Called with the gang when its ranks were started anew and have loaded the
            module, before anything else: gives them what changed since the first start.
    """

    def __init__(
        self, asked: Asked, existing: Existing, report: GangReport, warner: Warner | None = None
    ) -> None:
        self.report = report
        self.last_call: CallReport | None = None
        self.on_rebuilt: Callable[[Gang], None] | None = None
        self._asked = asked
        self._existing = existing
        self._seen = _Seen()
        self._turn = threading.Lock()
        # Ray's promises of a call that was interrupted; the ranks are still at it
        self._flight: dict[Any, Member] = {}
        self._asked_at = 0.0
        self._warner = warner or Warner()
        self._seats = itertools.count(1)
        self._finalizer = weakref.finalize(self, existing.cleanup.run_apart)
        self._finalizer.atexit = False  # the clean-up has its own place at the exit

    @classmethod
    def start(
        cls,
        *,
        degrees: Degrees | Undecided,
        load: Offer,
        config: GangConfig | None = None,
        parallel: ParallelConfig | None = None,
        prepare: PrepareConfig | None = None,
        progress: Callable[[str], None] | None = None,
        transport: Transport | None = None,
        warnings: tuple[str, ...] = (),
    ) -> Gang:
        """Start the ranks, give them the module and let them split it: all or nothing.

        Args:
            degrees: How many ways along each split; their product is the number of ranks. Or how
                to decide, once the module is there.
            load: Where the weights come from: what `raymod.weights.offer` gives.
            config: Where and how the ranks run.
            parallel: What was asked of the split.
            prepare: What each rank does to its module.
            progress: Called with the name of each phase, instead of the progress line.
            transport: How calls travel to ranks that share no memory with this process. None:
                through Ray's object store.
            warnings: What the user should know before it starts.

        Raises:
            CapacityError: The cluster does not have what the ranks need.
            StartTimeoutError: They were not ready within `config.start_timeout_s`.
            GangStartError: They did not become ready; the cause is what stood in the way.
        """
        config, prepare = config or GangConfig(), prepare or PrepareConfig()
        limit_s = config.call_timeout_s + prepare.extra_call_s
        config = replace(config, call_timeout_s=limit_s)
        asked = Asked(
            config=config,
            degrees=degrees,
            parallel=parallel or ParallelConfig(),
            prepare=prepare,
            transport=transport or RayTransport(timeout_s=config.call_timeout_s),
        )
        warner = Warner()
        warner.warn((*warnings, *load.warnings))
        with Progress(progress) as steps:
            existing = start(asked, load, steps)
        report = GangReport(
            ranks=existing.infos,
            phases=steps.phases,
            split=existing.split,
            warnings=tuple(dict.fromkeys((*warnings, *existing.warnings))),
            near=existing.lines.near,
        )
        gang = cls(asked, existing, report, warner)
        warner.warn(report.warnings)
        return gang

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._asked.world_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._seen.closing

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks as the driver knows them."""
        return self._existing.members

    def next_seat(self) -> int:
        """A number for a further module on these ranks."""
        return next(self._seats)

    # -- work ----------------------------------------------------------------------------------

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        contexts: tuple[tuple[str, Mapping[str, Any]], ...] = (),
        *,
        seat: int = 0,
    ) -> Any:
        """One call of the module, on all ranks.

        Args:
            args: Positional arguments, nested as they like.
            kwargs: Keyword arguments.
            contexts: Name and fields of each cache context that it is made in, outermost first.
            seat: Which of the modules on these ranks; 0 is the first.

        Returns:
            What the module returns, on the CPU.

        Raises:
            PackError: An argument cannot travel.
            RankError: A rank raised. If all ranks raised alike, the gang goes on.
            RankDiedError: A rank is gone.
            CallTimeoutError: No answer within `call_timeout_s`.
            GangFailedError: The gang had ended before.
            StubClosedError: The gang was closed.
        """
        self._check_open()
        lines = self._existing.lines
        began = time.monotonic()
        call = (tuple(args), dict(kwargs), tuple(contexts), seat)
        packed = pack(call, what="argument", as_it_is=True, dense=True)
        pack_s = time.monotonic() - began
        with self._my_turn():
            began = time.monotonic()
            sent = lines.send(packed)
            replies = self._exchange(
                lambda member: lines.ask(member, "forward", sent),
                self._asked.config.call_timeout_s,
            )
            received = self._received(replies)
            asked = self._asked_at
        parts = list(map(unpack, received))
        self._warner.warn(text for reply in replies for text in reply.warnings)
        how = next((reply.join for reply in replies if reply.parcel is not None), None)
        output = parts[0] if how is None else join(parts, how)
        ended, compute_s = time.monotonic(), max(reply.seconds for reply in replies)
        self.last_call = CallReport(
            sent_bytes=sent.nbytes - sent.reused_bytes,
            reused_bytes=sent.reused_bytes,
            returned_bytes=sum(part.nbytes for part in received),
            pack_s=pack_s,
            send_s=asked - began,
            compute_s=compute_s,
            reply_s=max(0.0, ended - asked - compute_s),
            total_s=pack_s + ended - began,
        )
        return output

    def call_all(
        self,
        method: str | Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        reply_rank: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run something on every rank.

        Args:
            method: Name of a method of the worker, or a picklable function that gets the worker
                (`.module`, `.rank`, `.world_size`, `.device`) as its first argument.
            *args: Further arguments.
            timeout_s: Limit in seconds. None: that of a call.
            reply_rank: Send back only this rank's reply.
            **kwargs: Further arguments.

        Returns:
            The replies in rank order, or the one of `reply_rank`, as a list.

        Raises:
            ConfigError: There is no such method or rank.
            GangError: As for `call`.
        """
        self._check_open()
        if isinstance(method, str) and (method.startswith("_") or not hasattr(Worker, method)):
            raise ConfigError(f"a rank has no method {method!r}; give a function of the worker")
        if reply_rank is not None and not 0 <= reply_rank < self.world_size:
            raise ConfigError(f"reply_rank={reply_rank}: there are {self.world_size} ranks")
        limit_s = self._asked.config.call_timeout_s if timeout_s is None else timeout_s
        lines = self._existing.lines
        packed = pack((method, args, kwargs), what="argument", as_it_is=True)
        with self._my_turn():
            sent = lines.send(packed)
            replies = self._exchange(
                lambda member: lines.ask(
                    member, "run", sent, replies=reply_rank in (None, member.rank)
                ),
                limit_s,
            )
            received = self._received(replies)
        return list(map(unpack, received))

    def health(self, timeout_s: float = 5.0) -> tuple[Health, ...]:
        """How each rank is, also during a call; a rank that does not answer is not `ok`.

        Args:
            timeout_s: Limit in seconds.

        Raises:
            GangFailedError: The gang has ended.
            StubClosedError: The gang was closed.
        """
        self._check_open()
        return ask_health(self.members, timeout_s)

    # -- end -----------------------------------------------------------------------------------

    def fail(self, error: GangError) -> None:
        """End the ranks because of `error`, as if a rank had died; later calls say so."""
        if self._seen.failure is None:
            self._end_as_failed(error)

    def close(self) -> None:
        """End the ranks and free what they held. Bounded in time; twice is not worse.

        A call that another thread waits for may finish within `close_timeout_s`; then the ranks
        are killed, and it raises `StubClosedError`.
        """
        if self._existing.cleanup.is_forked():
            return  # the ranks go on, for the process that they belong to
        first = not self._seen.closing
        self._seen = _Seen(failure=self._seen.failure, closing=True, closed=self._seen.closed)
        if first and self._seen.failure is None:
            self._close_gracefully()
        self._finalizer.detach()
        self._existing.cleanup.run()
        self._seen = _Seen(failure=self._seen.failure, closing=True, closed=True)

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _close_gracefully(self) -> None:
        interrupted = bool(self._flight) and not self._turn.locked()
        if interrupted or not self._existing.session.is_live():
            return
        with suppress(Exception):  # what stands in the way is killed
            lines = self._existing.lines
            asked = {lines.ask(m, "answer", "close"): m for m in self._existing.members}
            limit_s = self._asked.config.close_timeout_s
            lines.collect(asked, deadline=time.monotonic() + limit_s)

    # -- within --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._existing.cleanup.is_forked():
            raise StubClosedError(
                "this process was forked off the one that the ranks belong to: call them there, "
                "or wrap the module here anew"
            )
        if self._seen.closing:
            raise StubClosedError("the gang was closed; its ranks are gone")
        if self._seen.failure is None and not self._existing.session.is_live():
            self._end_as_failed(
                RankDiedError("Ray was shut down in this process, and the ranks with it")
            )
        failure = self._seen.failure
        if failure is not None:
            raise GangFailedError(
                f"the gang ended in an earlier failure "
                f"({type(failure).__name__}: {first_line(failure)})"
            ) from failure

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        """One request at a time, so that every rank sees the same order."""
        while not self._turn.acquire(timeout=_TURN_SLICE_S):
            self._check_open()
        try:
            self._check_open()
            self._finish_interrupted()
            yield
        finally:
            self._turn.release()

    def _exchange(self, ask: Callable[[Member], Any], limit_s: float) -> list[Reply]:
        """Ask all ranks and settle what comes of it."""
        with interrupt_deferred():  # asked by half, the ranks that were would wait for the others
            self._flight = {ask(member): member for member in self._existing.members}
            self._asked_at = time.monotonic()
        outcome = self._existing.lines.collect(
            self._flight, deadline=time.monotonic() + limit_s, look=self._check_not_closed
        )
        self._flight = {}
        self._settle(outcome)
        return [outcome.replies[member.rank] for member in self._existing.members]

    def _finish_interrupted(self) -> None:
        """Wait for what the ranks are still doing for a call that was interrupted."""
        if not self._flight:
            return
        began, limit_s = time.monotonic(), self._asked.config.call_timeout_s
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

        outcome = self._existing.lines.collect(self._flight, deadline=began + limit_s, look=look)
        self._flight = {}
        try:
            self._settle(outcome)
        except RankError:
            if self._seen.failure is not None:
                raise

    def _settle(self, outcome: Outcome) -> None:
        error: GangError | None = judge(outcome, self._existing.members)
        if error is None and outcome.silent:
            error = self._late(outcome)
        if error is None:
            return
        if self._seen.closing:
            raise StubClosedError("the gang was closed during the call") from error
        if not (isinstance(error, RankError) and self._is_in_step(outcome)):
            self._end_as_failed(error)
        raise error

    def _is_in_step(self, outcome: Outcome) -> bool:
        """Whether the ranks, all of which raised alike, can go on; tried with a collective."""
        if not in_step(outcome, self.world_size):
            return False
        limit = time.monotonic() + _STEP_TEST_S
        lines = self._existing.lines
        with interrupt_deferred():
            asked = {
                lines.ask(m, "answer", "self_test", _STEP_TEST_S): m for m in self._existing.members
            }
        tested = lines.collect(asked, deadline=limit)
        return judge(tested, self._existing.members) is None and not tested.silent

    def _late(self, outcome: Outcome) -> CallTimeoutError:
        late = ", ".join(str(m) for m in self._existing.members if m.rank in outcome.silent)
        return CallTimeoutError(
            f"no answer from {late} within {outcome.waited_s:.1f} s; the gang was ended. A longer "
            f"limit is set with GangConfig(call_timeout_s=...)"
        )

    def _end_as_failed(self, error: GangError) -> None:
        self._seen = _Seen(failure=error, closing=self._seen.closing, closed=self._seen.closed)
        self._existing.ranks.run()

    def _check_not_closed(self) -> None:
        if self._seen.closed:
            raise StubClosedError("the gang was closed during the call")

    def _received(self, replies: list[Reply]) -> list[Packed]:
        """What the ranks sent; in this turn, as their memory is used again in the next."""
        receive = self._existing.lines.receive
        try:
            return [receive(reply.rank, reply.parcel) for reply in replies if reply.parcel]
        except CannotOpenError as error:
            if self._seen.closing:
                raise StubClosedError("the gang was closed during the call") from error
            gone = RankDiedError(f"a rank ended before what it sent could be read: {error}")
            self._end_as_failed(gone)
            raise gone from error
