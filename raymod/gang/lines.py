"""How the driver reaches its ranks: by a local socket and shared memory, or through Ray.

A rank that can open the driver's memory, and whose memory the driver can open, serves a socket:
it runs a method of its actor that ends with the line, and the promise of that method is its sign
of life. All other ranks are called through Ray.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raymod.calls import Packed, pack
from raymod.errors import GangError, RankFailure
from raymod.gang.interrupts import interrupt_deferred
from raymod.gang.ranks import Member, Outcome, cause_of_death, collect, fetch, is_alive
from raymod.transport import Parcel, SharedTransport, Transport
from raymod.transport.wire import LineTicket, Listener, Wire, WireClosedError

__all__ = ["Lines", "Sent"]

logger = logging.getLogger(__name__)

_PROBE_BYTES = 256 << 10
_ACCEPT_S = 0.05
# So long Ray may take to tell why a rank is gone.
_CAUSE_S = 2.0


@dataclass(frozen=True)
class Sent:
    """One packed object on its way to all ranks.

    Attributes:
        near: For the ranks that share memory with the driver, if there are any.
        far: For the others.
    """

    near: Parcel | None
    far: Parcel | None

    @property
    def nbytes(self) -> int:
        """Size in bytes of what there was to send, once for each way."""
        return sum(parcel.nbytes for parcel in self._parcels())

    @property
    def reused_bytes(self) -> int:
        """How much of it was there already."""
        return sum(parcel.reused_bytes for parcel in self._parcels())

    def _parcels(self) -> list[Parcel]:
        return [parcel for parcel in (self.near, self.far) if parcel is not None]


@dataclass(eq=False)
class _Promise:
    """A rank's answer to one request.

    Attributes:
        line: Where it will arrive.
        keeps: What has to stay until then.
        done: Whether it has.
        answer: The answer.
    """

    line: _Line
    keeps: Any
    done: bool = False
    answer: Any = None

    @property
    def is_ready(self) -> bool:
        return self.done or self.line.is_broken


@dataclass(eq=False)
class _FarPromise:
    """The same of a rank that is reached through Ray, in a gang where others are near."""

    ref: Any
    is_ready: bool = False


@dataclass(eq=False)
class _Line:
    """The driver's end of one near rank.

    Attributes:
        member: The rank.
        wire: The connection.
        serving: Ray's promise of the method that serves it; kept only while it does.
        is_broken: Whether nothing will arrive any more.
    """

    member: Member
    wire: Wire
    serving: Any
    is_broken: bool = False
    _number: int = 0
    _open: dict[int, _Promise] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, encoded: tuple[bool, bytes], keeps: Any) -> _Promise:
        promise = _Promise(self, keeps)
        with self._lock:
            self._number += 1
            self._open[self._number] = promise
            try:
                self.wire.send_encoded(self._number, encoded)
            except WireClosedError:
                self.is_broken = True
        return promise

    def pump(self) -> None:
        """Take what has arrived. Two threads may be at it: of a call, and of a close."""
        with self._lock:
            try:
                while (message := self.wire.receive(wait=False)) is not None:
                    promise = self._open.pop(message.number)
                    try:
                        promise.answer = self.wire.read(message)
                    except Exception as error:  # it arrived and cannot be read here
                        promise.answer = RankFailure.of(
                            error, rank=self.member.rank, node=self.member.spot.node_address
                        )
                    promise.done = True
            except WireClosedError:
                self.is_broken = True

    def cause(self) -> str:
        """Why it is broken, as Ray knows it."""
        try:
            reason = ray.get(self.serving, timeout=_CAUSE_S)
        except RayActorError as error:
            return cause_of_death(error)
        except GetTimeoutError:
            return "its process ended, or its connection to the driver"
        except RayError as error:
            return f"it stopped serving: {error}"
        return f"it stopped serving: {reason}"


class Lines:
    """The ways to all ranks of a gang.

    Args:
        members: The ranks.
        transport: For those that are reached through Ray.
    """

    def __init__(self, members: Sequence[Member], transport: Transport) -> None:
        self._members = tuple(members)
        self._transport = transport
        self._shared = SharedTransport()
        self._near: dict[int, _Line] = {}
        self._bell = _Bell()
        self._last_request: tuple[Any, Any] = (None, None)

    @property
    def near(self) -> tuple[int, ...]:
        """The ranks that share memory with the driver."""
        return tuple(sorted(self._near))

    def connect(self, *, deadline: float) -> dict[int, str]:
        """Try every rank: those that can serve a local socket do so from now on.

        Args:
            deadline: Limit, on the monotonic clock.

        Returns:
            Why the others cannot, by rank.
        """
        probe = torch.frombuffer(bytearray(os.urandom(_PROBE_BYTES)), dtype=torch.uint8)
        try:
            sent = self._shared.send(pack(probe))
            listener = Listener(self._shared)
        except (GangError, OSError) as error:
            return {member.rank: str(error) for member in self._members}
        try:
            ticket = LineTicket(listener.address, listener.token, sent)
            serving = {m.rank: m.actor.serve.remote(ticket) for m in self._members}
            return self._accept(listener, serving, probe, deadline)
        finally:
            listener.close()

    def send(self, packed: Packed) -> Sent:
        """Make `packed` available to all ranks."""
        is_mixed = len(self._near) < len(self._members)
        return Sent(
            near=self._shared.send(packed) if self._near else None,
            far=self._transport.send(packed) if is_mixed else None,
        )

    def ask(self, member: Member, method: str, *args: Any, **kwargs: Any) -> Any:
        """Have one rank run one of its actor's methods; an argument that is `Sent` arrives.

        Returns:
            A promise for `collect`.
        """
        line = self._near.get(member.rank)
        if line is None:
            given = [arg.far if isinstance(arg, Sent) else arg for arg in args]
            ref = getattr(member.actor, method).remote(*given, **kwargs)
            return self._bell.promise(ref) if self._near else ref
        given = [arg.near if isinstance(arg, Sent) else arg for arg in args]
        request = (method, given, kwargs)
        if request != self._last_request[0]:  # mostly the ranks are asked for the same
            self._last_request = request, line.wire.encode(request)
        return line.ask(self._last_request[1], given)

    def collect(
        self,
        asked: Mapping[Any, Member],
        *,
        deadline: float,
        look: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """See `raymod.gang.ranks.collect`; for the promises of `ask`."""
        if not self._near:
            return collect(asked, deadline=deadline, look=look)
        self._last_request = (None, None)  # the parcel in it is to be dropped with the call
        self._shared.settle()  # there is time for it now
        return collect(asked, deadline=deadline, look=look, wait=self._wait, fetch=_fetch)

    def receive(self, rank: int, parcel: Parcel) -> Packed:
        """What a rank sent; before it is asked for something else."""
        transport = self._shared if rank in self._near else self._transport
        return transport.receive(parcel)

    def close(self) -> None:
        """End the lines, and let go of the shared memory. Twice is not worse."""
        for line in self._near.values():
            line.wire.close()
            line.is_broken = True
        self._shared.close()
        self._bell.close()

    # -- within --------------------------------------------------------------------------------

    def _accept(
        self,
        listener: Listener,
        serving: dict[int, Any],
        probe: torch.Tensor,
        deadline: float,
    ) -> dict[int, str]:
        members = {member.rank: member for member in self._members}
        pending = dict(serving)
        reasons: dict[int, str] = {}
        while pending and time.monotonic() < deadline:
            wire = listener.accept(_ACCEPT_S)
            if wire is not None:
                rank = self._greet(wire, probe, deadline)
                if rank in pending:
                    self._near[rank] = _Line(members[rank], wire, pending.pop(rank))
                else:
                    wire.close()
            ended = ray.wait(list(pending.values()), timeout=0)[0] if pending else []
            for rank, ref in list(pending.items()):
                if ref in ended:
                    reasons[rank] = _reason(pending.pop(rank))
        return reasons | dict.fromkeys(pending, "it did not answer")

    def _greet(self, wire: Wire, probe: torch.Tensor, deadline: float) -> int:
        """The rank that connected and sent the probe back; -1 if something is wrong."""
        poll = select.poll()
        poll.register(wire, select.POLLIN)
        with suppress(GangError, WireClosedError):
            if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                message = wire.receive(wait=False)
                if message is not None:
                    (echo,) = self._shared.receive(wire.read(message)).tensors
                    return message.number if torch.equal(echo, probe) else -1
        return -1

    def _wait(self, pending: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those promises that are ready, as soon as there is one."""
        ready = [promise for promise in pending if promise.is_ready]
        if ready:
            return ready
        lines = {p.line.wire.fileno(): p.line for p in pending if isinstance(p, _Promise)}
        poll = select.poll()
        for number in {*lines, self._bell.fileno()} - {-1}:  # what is closed meanwhile has none
            poll.register(number, select.POLLIN)
        events = poll.poll(timeout_s * 1000)
        with interrupt_deferred():  # what has been taken from a socket must not be lost
            self._bell.clear()
            for number, _ in events:
                if number in lines:
                    lines[number].pump()
        if not events:
            _check_alive(lines.values())
        return [promise for promise in pending if promise.is_ready]


class _Bell:
    """Wakes a `poll` when Ray has an answer."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._reading

    def promise(self, ref: Any) -> _FarPromise:
        """A promise that rings when it is kept."""
        promise = _FarPromise(ref)

        def ring(_: Any) -> None:
            promise.is_ready = True
            with self._lock, suppress(BlockingIOError):
                if self._writing >= 0:
                    os.write(self._writing, b"!")

        ref.future().add_done_callback(ring)
        return promise

    def clear(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._reading >= 0:
                os.read(self._reading, 4096)

    def close(self) -> None:
        with self._lock:
            if self._writing >= 0:
                os.close(self._writing)
                os.close(self._reading)
            self._reading = self._writing = -1


def _check_alive(lines: Iterable[_Line]) -> None:
    """Notice ranks that are gone although a process they forked off keeps connections open."""
    serving = {line.serving: line for line in lines}
    if not serving:
        return
    ended, _ = ray.wait(list(serving), num_returns=len(serving), timeout=0)
    for ref, line in serving.items():
        line.is_broken |= ref in ended or not is_alive(line.member.spot.pid)


def _fetch(promise: Any, member: Member, deadline: float) -> Any:
    if isinstance(promise, _FarPromise):
        return fetch(promise.ref, member, deadline)
    return promise.answer if promise.done else promise.line.cause()


def _reason(ref: Any) -> str:
    try:
        return str(ray.get(ref, timeout=_CAUSE_S))
    except RayActorError as error:
        return cause_of_death(error)
    except RayError as error:
        return f"{type(error).__name__}: {error}"
