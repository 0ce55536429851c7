"""A gang that is up: calls, health, and its end."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from raymod.calls import pack, unpack
from raymod.calls.joining import join
from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.errors import GangError, RankDiedError, StubClosedError
from raymod.gang.asking import Asking, request
from raymod.gang.health import ask_health
from raymod.gang.progress import Progress
from raymod.gang.ranks import Member
from raymod.gang.reports import CallReport, GangReport
from raymod.gang.restarts import Restarts
from raymod.gang.start import Asked, Existing, Undecided, start
from raymod.gang.telling import Warner
from raymod.transport import RayTransport, Transport
from raymod.weights import Offer
from raymod.worker import Health

__all__ = ["Gang"]


class Gang:
    """The ranks of one module, in rank order, as one thing. Made by `Gang.start`.

    One fate: when a rank dies or hangs, or raises while others do not, the whole gang is ended
    and every later call raises at once. Safe to use from several threads, which take turns.

    Attributes:
        report: How it was started.
        last_call: Where the time and the bytes of the last call went; None before it.
        restarts: What it takes to start the ranks anew.
        on_rebuilt: Called with the gang when its ranks were started anew and have loaded the
            module, before anything else: gives them what changed since the first start.
    """

    def __init__(
        self,
        asked: Asked,
        existing: Existing,
        report: GangReport,
        warner: Warner,
        restarts: Restarts,
    ) -> None:
        self.report = report
        self.restarts = restarts
        self.last_call: CallReport | None = None
        self.on_rebuilt: Callable[[Gang], None] | None = None
        self._asked = asked
        self._asking = Asking(existing, asked.config.call_timeout_s)
        self._calls: Counter[int] = Counter()  # by seat
        self._warner = warner
        self._seats = itertools.count(1)
        self._finalizer = self._finalized_by(existing)

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
        again: Callable[[], Offer] | None = None,
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
            again: Offers the weights once more, should the ranks have to be started anew.

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
        report = _report(existing, steps.phases, warnings)
        gang = cls(asked, existing, report, warner, Restarts(asked, again, progress))
        warner.warn(report.warnings)
        return gang

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._asked.world_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._asking.seen.closing

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks as the driver knows them."""
        return self._asking.existing.members

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
        self._refuse_if_closed()
        while True:
            number = self.restarts.number
            try:
                return self._call(args, kwargs, contexts, seat)
            except RankDiedError:
                with self._asking.turn:  # in which another thread may start the ranks anew
                    if number == self.restarts.number and not self._is_lost():
                        raise

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        contexts: tuple[tuple[str, Mapping[str, Any]], ...],
        seat: int,
    ) -> Any:
        began = time.monotonic()
        call = (tuple(args), dict(kwargs), tuple(contexts), seat)
        packed = pack(call, what="argument", as_it_is=True, dense=True)
        pack_s = time.monotonic() - began
        with self._asking.my_turn(self._restart_if_lost):
            lines = self._asking.existing.lines
            began = time.monotonic()
            sent = lines.send(packed)
            self._calls[seat] += 1
            try:
                replies = self._asking.exchange(
                    lambda member: lines.ask(member, "forward", sent),
                    self._asked.config.call_timeout_s,
                )
                received = self._asking.received(replies)
            except RankDiedError:
                self._calls[seat] -= 1
                raise
            asked = self._asking.asked_at
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
        self._refuse_if_closed()
        limit_s = self._asked.config.call_timeout_s if timeout_s is None else timeout_s
        packed = request(method, args, kwargs, reply_rank=reply_rank, world_size=self.world_size)
        with self._asking.my_turn(self._restart_if_lost):
            lines = self._asking.existing.lines
            sent = lines.send(packed)
            replies = self._asking.exchange(
                lambda member: lines.ask(
                    member, "run", sent, replies=reply_rank in (None, member.rank)
                ),
                limit_s,
            )
            received = self._asking.received(replies)
        return list(map(unpack, received))

    def health(self, timeout_s: float = 5.0) -> tuple[Health, ...]:
        """How each rank is, also during a call; a rank that does not answer is not `ok`.

        Args:
            timeout_s: Limit in seconds.

        Raises:
            GangFailedError: The gang has ended.
            StubClosedError: The gang was closed.
        """
        self._asking.check_open()
        return ask_health(self.members, timeout_s)

    # -- a new start ---------------------------------------------------------------------------

    def restart(self) -> None:
        """End the ranks if they still live, start them anew and give them all that has changed.

        Raises:
            GangError: Nobody has the weights any more, or the ranks did not become ready.
            StubClosedError: The gang was closed.
        """
        self._refuse_if_closed()
        with self._asking.turn:
            self._start_anew(None)

    def _refuse_if_closed(self) -> None:
        if self.closed or self._asking.existing.cleanup.is_forked():
            self._asking.check_open()

    def _restart_if_lost(self) -> None:
        """Start the ranks anew where a rank has died and that is wanted; in this thread's turn."""
        if self._is_lost():
            self.restarts.by_itself += 1
            self._start_anew(self._asking.seen.failure)

    def _is_lost(self) -> bool:
        return (
            not self._asking.seen.closing
            and self.restarts.covers(self._asking.seen.failure)
            and self._asking.existing.session.is_live()
        )

    def _start_anew(self, failure: GangError | None) -> None:
        began = time.monotonic()
        self.restarts.check()  # before what lives is ended
        self.fail(GangError("the ranks were ended to be started anew"))
        existing, phases = self.restarts.start()
        self._finalizer.detach()
        before = self._asking.existing
        self._asking.go_on_with(existing)
        self._finalizer = self._finalized_by(existing)
        before.cleanup.run()
        if self.closed:
            existing.cleanup.run()
            raise StubClosedError("the gang was closed while its ranks were started anew")
        self.report = _report(existing, phases, self.report.warnings)
        try:
            self.resume(0)
            if self.on_rebuilt is not None:
                self.on_rebuilt(self)
        except BaseException as error:
            # whatever it was: ranks that have some of the changes must not answer
            half = GangError("the ranks were started anew, but did not get all that had changed")
            self.fail(error if isinstance(error, GangError) else half)
            raise
        self.restarts.tell(failure, time.monotonic() - began)

    def resume(self, seat: int) -> None:
        """Let new ranks count the calls of a module from where the ones before them were."""
        self.call_all(_resume, seat, self._calls[seat])

    def _finalized_by(self, existing: Existing) -> weakref.finalize[Any, Any]:
        finalizer = weakref.finalize(self, existing.cleanup.run_apart)
        finalizer.atexit = False  # the clean-up has its own place at the exit
        return finalizer

    # -- end -----------------------------------------------------------------------------------

    def fail(self, error: GangError) -> None:
        """End the ranks because of `error`, as if a rank had died; later calls say so."""
        if self._asking.seen.failure is None:
            self._asking.fail(error)

    def close(self) -> None:
        """End the ranks and free what they held. Bounded in time; twice is not worse.

        A call that another thread waits for may finish within `close_timeout_s`; then the ranks
        are killed, and it raises `StubClosedError`.
        """
        if self._asking.existing.cleanup.is_forked():
            return  # the ranks go on, for the process that they belong to
        seen = self._asking.seen
        self._asking.seen = replace(seen, closing=True)
        if not seen.closing and seen.failure is None:
            self._close_gracefully()
        self._finalizer.detach()
        self._asking.existing.cleanup.run()
        self._asking.seen = replace(self._asking.seen, closed=True)

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _close_gracefully(self) -> None:
        if self._asking.is_stuck() or not self._asking.existing.session.is_live():
            return
        with suppress(Exception):  # what stands in the way is killed
            lines = self._asking.existing.lines
            asked = {lines.ask(m, "answer", "close"): m for m in self._asking.existing.members}
            limit_s = self._asked.config.close_timeout_s
            lines.collect(asked, deadline=time.monotonic() + limit_s)


def _resume(worker: Any, seat: int, calls: int) -> None:
    with worker.at(seat):
        worker.resume(calls)


def _report(existing: Existing, phases: Mapping[str, float], said: tuple[str, ...]) -> GangReport:
    return GangReport(
        ranks=existing.infos,
        phases=phases,
        split=existing.split,
        warnings=tuple(dict.fromkeys((*said, *existing.warnings))),
        near=existing.lines.near,
    )
