"""A gang of one rank in the driver's own process, without Ray: for debugging."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from raymod.calls import Packed, pack, unpack
from raymod.calls.joining import join
from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.errors import GangError, RankError, StubClosedError, UnsupportedError
from raymod.gang.asking import request
from raymod.gang.reports import CallReport, GangReport
from raymod.gang.start import Undecided
from raymod.gang.telling import Warner, failed_before
from raymod.transport import Parcel, Transport
from raymod.weights import Offer
from raymod.worker import Health, Reply, Worker

__all__ = ["HereGang"]


class _Passed(Transport):
    """Hands packed objects over as they are; the receiver gets tensors of its own.

    Only from one thread to itself: what is sent is received before anybody can change it.
    """

    def send(self, packed: Packed) -> Parcel:
        return Parcel((), packed.nbytes, packed.plain())

    def reply(self, packed: Packed) -> Parcel:
        return self.send(packed)

    def receive(self, parcel: Parcel, *, device: torch.device | None = None) -> Packed:
        packed: Packed = parcel.payload
        return Packed(packed.skeleton, tuple(tensor.clone() for tensor in packed.tensors))

    def forget(self) -> None:
        pass


class HereGang:
    """One rank here, which does what a rank of a real gang does, by the same code.

    Breakpoints and print statements in the module work, and it sees the driver's globals. Nothing
    limits the time of a call, and what ends the process ends the driver.

    Attributes:
        report: How it was started.
        last_call: Where the time and the bytes of the last call went; None before it.
        on_rebuilt: Not called: this rank is never started anew.
    """

    world_size = 1

    def __init__(self, worker: Worker, report: GangReport, warner: Warner) -> None:
        self.report = report
        self.last_call: CallReport | None = None
        self.on_rebuilt: Callable[[Any], None] | None = None
        self._worker = worker
        self._warner = warner
        self._turn = threading.RLock()  # a breakpoint in a call may make another one
        self._failure: GangError | None = None
        self._is_closed = False

    @classmethod
    def start(
        cls,
        *,
        degrees: Degrees | Undecided,
        load: Offer,
        parallel: ParallelConfig,
        prepare: PrepareConfig,
    ) -> HereGang:
        """Load and prepare the module, here; see `Gang.start`.

        What a step raises is raised as it is.
        """
        worker = Worker(rank=0, world_size=1, node="this process", transport=_Passed())
        if torch.cuda.is_available():
            worker.device = torch.device("cuda", torch.cuda.current_device())
        warner = Warner()
        warner.warn(load.warnings)
        began = time.monotonic()
        worker.load(load.ticket)
        if isinstance(degrees, Undecided):
            degrees = degrees.decide(worker.skeleton())
        loaded = time.monotonic()
        if prepare.threads is None:
            prepare = replace(prepare, threads=torch.get_num_threads())
        with _driver_unchanged():
            prepared = worker.prepare(degrees=degrees, parallel=parallel, config=prepare)
        report = GangReport(
            ranks=(worker.info(),),
            phases={"loading": loaded - began, "splitting": time.monotonic() - loaded},
            split=f"{prepared.split}, in this process",
            warnings=tuple(dict.fromkeys([*load.warnings, *prepared.warnings])),
            near=(0,),
        )
        warner.warn(report.warnings)
        return cls(worker, report, warner)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        contexts: tuple[tuple[str, Mapping[str, Any]], ...] = (),
    ) -> Any:
        """See `Gang.call`."""
        began = time.monotonic()
        call = (tuple(args), dict(kwargs), tuple(contexts), 0)
        packed = pack(call, what="argument", as_it_is=True, dense=True)
        packed_at = time.monotonic()
        reply, received = self._ask(self._worker.forward, packed)
        self._warner.warn(reply.warnings)
        output = unpack(received)
        if reply.join is not None:
            output = join([output], reply.join)
        ended = time.monotonic()
        self.last_call = CallReport(
            sent_bytes=packed.nbytes,
            reused_bytes=0,
            returned_bytes=received.nbytes,
            pack_s=packed_at - began,
            send_s=0.0,
            compute_s=reply.seconds,
            reply_s=max(0.0, ended - packed_at - reply.seconds),
            total_s=ended - began,
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
        """See `Gang.call_all`; there is no limit on its time."""
        packed = request(method, args, kwargs, reply_rank=reply_rank, world_size=1)
        _, received = self._ask(lambda sent: self._worker.run(sent, replies=True), packed)
        return [unpack(received)]

    def health(self, timeout_s: float = 5.0) -> tuple[Health, ...]:
        """See `Gang.health`."""
        self._check_open()
        return (self._worker.health(),)

    def restart(self) -> None:
        """There is no process to start anew.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "workers=0 is one rank in this process, which cannot be started anew: unwrap the "
            "module and wrap it again."
        )

    def fail(self, error: GangError) -> None:
        """See `Gang.fail`."""
        self._failure = self._failure or error

    def close(self) -> None:
        """Let go of the rank's module."""
        if not self._is_closed:
            self._is_closed = True
            with self._turn:
                self._worker.close()

    def _ask(self, ask: Callable[[Parcel], Reply], packed: Packed) -> tuple[Reply, Packed]:
        with self._turn, _driver_unchanged():
            self._check_open()
            reply = ask(self._worker.transport.send(packed))
        if reply.failure is not None:
            raise RankError.from_failures([reply.failure])
        assert reply.parcel is not None  # a rank alone always answers
        return reply, self._worker.transport.receive(reply.parcel)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StubClosedError("the gang was closed; its rank is gone")
        if self._failure is not None:
            raise failed_before(self._failure)


@contextmanager
def _driver_unchanged() -> Iterator[None]:
    """The driver's random numbers go on as if the rank were another process."""
    with torch.random.fork_rng(devices=[]):
        yield
