"""One rank: it joins the others, gets its module, prepares it, and answers calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raymod import weights
from raymod.calls import describe, pack, unpack
from raymod.calls.joining import Join
from raymod.calls.modes import MODES, in_modes
from raymod.calls.values import CONTEXT, arrived
from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError, RankFailure
from raymod.prepare import PrepareReport, SplitModule, prepare
from raymod.transport import Parcel, Transport
from raymod.weights.offers import MemoryTicket
from raymod.worker import group, host

__all__ = ["Health", "RankInfo", "Reply", "Worker"]


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What a rank says of itself when it is up.

    Attributes:
        rank: Its rank.
        node_id: Ray's id of its node.
        node_address: Ray's address of its node.
        device: Its torch device.
        device_name: Model of the device.
        gpu_ids: The GPUs that Ray reserved for it, as Ray names them.
        pid: Its process.
        versions: Version of each package that driver and ranks must agree on.
        warnings: What the user should know about this rank.
    """

    rank: int
    node_id: str
    node_address: str
    device: str
    device_name: str
    gpu_ids: tuple[str, ...]
    pid: int
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a rank answers to one request.

    Attributes:
        rank: The rank.
        parcel: Its output, or its part of it; None if it sends none.
        value: A small plain answer.
        join: How the parts of the output go together.
        warnings: For the user.
        failure: What it raised instead.
        done: Whether the work itself was done; a failure then came of sending what it gave.
        steps: After a failure: how many collectives it has begun.
        seconds: How long it took.
    """

    rank: int
    parcel: Parcel | None = None
    value: Any = None
    join: Join | None = None
    warnings: tuple[str, ...] = ()
    failure: RankFailure | None = None
    done: bool = True
    steps: group.Steps | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """How a rank is, asked apart from its work.

    Attributes:
        rank: The rank.
        state: What it is doing: "idle", or the name of a method.
        busy_s: For how long, in seconds.
        calls: Forwards that it has done.
        rss_bytes: Resident memory of its process.
        ok: Whether it answered.
    """

    rank: int
    state: str
    busy_s: float = 0.0
    calls: int = 0
    rss_bytes: int = 0
    ok: bool = True


@dataclass
class _Work:
    """What the rank is doing now; read from the health thread."""

    state: str = "idle"
    since: float = field(default_factory=time.monotonic)
    calls: int = 0


class Worker:
    """One rank of a gang.

    Attributes:
        rank: Its rank.
        world_size: Number of ranks.
        node: Address of its node.
        transport: How its calls travel.
        device: Where its module runs.
        module: Its prepared module; None before `prepare`.
        undo: How the last change of the module is taken back, while that can still be asked.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        node: str,
        node_id: str = "",
        gpu_ids: tuple[str, ...] = (),
        transport: Transport,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.module: nn.Module | None = None
        self.node = node
        self._node_id = node_id
        self._gpu_ids = gpu_ids
        self.transport = transport
        self._store: TCPStore | None = None
        self._has_joined = False
        self._receiver: weights.Receiver | None = None
        self._split: SplitModule | None = None
        self.undo: Any = None
        self._seat = 0
        self._others: dict[int, tuple[Any, ...]] = {}
        self._work = _Work()
        gpu_count = torch.cuda.device_count() if gpu_ids else 0
        self.device, self._warnings = host.choose_device(gpu_ids, os.environ, gpu_count)

    # -- start ---------------------------------------------------------------------------------

    def hello(self) -> RankInfo:
        """Say who and where this rank is."""
        # libraries read these; the driver may have had others, of its own launcher
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.device.index or 0),
        )
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        return self.info()

    def info(self) -> RankInfo:
        """Who and where this rank is."""
        return RankInfo(
            rank=self.rank,
            node_id=self._node_id,
            node_address=self.node,
            device=str(self.device),
            device_name=host.device_name(self.device),
            gpu_ids=self._gpu_ids,
            pid=os.getpid(),
            versions=host.versions(),
            warnings=self._warnings,
        )

    def bind(self, address: str) -> tuple[str, int]:
        """Serve the rendezvous of all ranks; for rank 0.

        Args:
            address: The only address to listen on.

        Returns:
            Address and port.
        """
        self._store, port = group.serve(address)
        return address, port

    def join(
        self, address: str, port: int, *, own_address: str, timeout_s: float, limit_s: float
    ) -> None:
        """Join the group of all ranks; see `raymod.worker.group.join`."""
        self._has_joined = True
        group.join(
            store=self._store,
            address=address,
            port=port,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            own_address=own_address,
            timeout_s=timeout_s,
            limit_s=limit_s,
        )

    def self_test(self, limit_s: float) -> None:
        """One small collective on this rank's device, with its own limit in seconds."""
        group.self_test(self.device, limit_s)

    def can_load(self, ticket: weights.Ticket) -> bool:
        """Whether `load` works here with this ticket; see `raymod.weights.can_open`."""
        return weights.can_open(ticket)

    def load(self, ticket: weights.Ticket) -> None:
        """Get the module.

        Args:
            ticket: What the offer of the weights, or a rank of this node, gave out.
        """
        self.module = weights.load(ticket)

    def skeleton(self) -> weights.Skeleton:
        """The module without its weights, for a driver that has none."""
        if self.module is None:
            raise ConfigError("nothing is loaded: call load first")
        return weights.pack_skeleton(self.module)

    def receive(self, ticket: MemoryTicket) -> None:
        """Get ready to take the weights in pieces, for all ranks of this node."""
        self._receiver = weights.Receiver(ticket)

    def receive_piece(self, piece: weights.Piece) -> None:
        """Take one piece."""
        self._receiving().receive_piece(piece)

    def received(self) -> weights.Ticket:
        """The ticket of this node, once all pieces are here."""
        return self._receiving().ticket

    def release(self) -> None:
        """Let go of what was received; all ranks of this node have loaded."""
        self._receiving().close()
        self._receiver = None

    def prepare(
        self, *, degrees: Degrees, parallel: ParallelConfig, config: PrepareConfig
    ) -> PrepareReport:
        """Split the loaded module and what else is asked; afterwards this rank serves."""
        if self.module is None:
            raise ConfigError("nothing is loaded: call load first")
        self._split = prepare(
            self.module,
            degrees=degrees,
            parallel=parallel,
            prepare=config,
            device=self.device,
            rank_info=self.info(),
        )
        self.module = self._split.module
        return self._split.report

    # -- work ----------------------------------------------------------------------------------

    def answer(self, method: str, *args: Any, **kwargs: Any) -> Reply:
        """Run one of the methods above; what it raises becomes part of the reply."""
        with self._busy(method) as began:
            try:
                value = getattr(self, method)(*args, **kwargs)
            except Exception as error:
                return self._failed(error, began)
            return Reply(rank=self.rank, value=value, seconds=time.monotonic() - began)

    def forward(self, parcel: Parcel) -> Reply:
        """One call of the module.

        Args:
            parcel: `(args, kwargs, contexts, seat)`, packed and sent; `contexts` are names and
                fields of the module's `cache_context`, outermost first.
        """
        call: Any = None
        done = False
        with self._busy("forward") as began:
            try:
                packed = self.transport.receive(parcel, device=self.device)
                args, kwargs, contexts, seat = unpack(packed, device=self.device)
                call = (args, kwargs)
                with self.at(seat), self._in_contexts(contexts):
                    if self._split is None:
                        raise ConfigError("nothing is prepared: call prepare first")
                    share = self._split(args, kwargs)
                done = True
                # prepare has waited for the collectives of share.output, so its bytes are there
                sent = self._send(share.output) if share.replies else None
            except (Exception, SystemExit) as error:
                return self._failed(error, began, call, done=done)
            self._work.calls += 1
            return Reply(
                rank=self.rank,
                parcel=sent,
                join=share.join,
                warnings=share.warnings,
                seconds=time.monotonic() - began,
            )

    def run(self, parcel: Parcel, *, replies: bool) -> Reply:
        """One method of this class, or one function of the user.

        Args:
            parcel: `(method, args, kwargs)`, packed and sent; `method` is a name, or a function
                that gets this worker as its first argument.
            replies: Whether to send back what it returns.
        """
        call: Any = None
        done = False
        with self._busy("run") as began:
            try:
                method, args, kwargs = unpack(self.transport.receive(parcel))
                call = (args, kwargs)
                value = self._function(method)(*args, **kwargs)
                done = True
                sent = self._send(value) if replies else None
            except (Exception, SystemExit) as error:
                return self._failed(error, began, call, done=done)
            return Reply(rank=self.rank, parcel=sent, seconds=time.monotonic() - began)

    def resume(self, calls: int) -> None:
        """Go on where ranks that are gone were after that many calls."""
        if self._split is not None:
            self._split.resume(calls)

    @contextmanager
    def at(self, seat: int) -> Iterator[None]:
        """Work on another module that this rank holds; 0 is the one that it was started with."""
        before = self._seat
        self._take(seat)
        try:
            yield
        finally:
            self._take(before)

    @contextmanager
    def unsplit(self) -> Iterator[nn.Module]:
        """The module as it is without its split, for what changes it; afterwards it is split again.

        The next call of each kind is then checked against the whole module as the first was.
        """
        if self._split is None:
            raise ConfigError("nothing is prepared: call prepare first")
        with self._split.unsplit() as module:
            yield module

    def health(self) -> Health:
        """How this rank is; safe to ask from another thread during a call."""
        work = self._work
        return Health(
            rank=self.rank,
            state=work.state,
            busy_s=0.0 if work.state == "idle" else time.monotonic() - work.since,
            calls=work.calls,
            rss_bytes=host.rss_bytes(),
        )

    def forget(self, seat: int) -> None:
        """Let go of another module than the first."""
        self._others.pop(seat, None)

    def close(self) -> None:
        """Leave the group and let go of the module. Twice is not worse."""
        self._split = self.module = self._store = None
        self._others.clear()
        if self._has_joined:  # else the group is the user's
            group.leave()

    # -- within --------------------------------------------------------------------------------

    @contextmanager
    def _in_contexts(self, contexts: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[None]:
        """In the cache contexts that the driver's call was made in."""
        with ExitStack() as stack:
            for name, fields in contexts:
                if name == CONTEXT:
                    arrived(fields)
                elif name == MODES:
                    stack.enter_context(in_modes(fields))
                else:
                    stack.enter_context(cast("Any", self.module).cache_context(name, **fields))
            yield

    def _take(self, seat: int) -> None:
        if seat == self._seat:
            return
        self._others[self._seat] = (self.module, self._split, self.undo, self._receiver)
        held = self._others.pop(seat, (None, None, None, None))
        self.module, self._split, self.undo, self._receiver = held
        self._seat = seat

    def _receiving(self) -> weights.Receiver:
        if self._receiver is None:
            raise ConfigError("this rank takes no pieces: call receive first")
        return self._receiver

    def _function(self, method: str | Callable[..., Any]) -> Callable[..., Any]:
        if callable(method):
            return lambda *args, **kwargs: method(self, *args, **kwargs)
        function: Any = None if method.startswith("_") else getattr(self, method, None)
        if not callable(function):
            raise AttributeError(
                f"a rank has no method {method!r}; give a function of the worker instead"
            )
        return cast("Callable[..., Any]", function)

    def _send(self, value: Any) -> Parcel:
        return self.transport.reply(pack(value, what="output", as_it_is=True))

    @contextmanager
    def _busy(self, state: str) -> Iterator[float]:
        """While in it the rank is doing `state`; gives the time it began."""
        began = time.monotonic()
        outer = self._work.state, self._work.since
        self._work.state, self._work.since = state, began
        try:
            yield began
        finally:
            self._work.state, self._work.since = outer

    def _failed(
        self, error: BaseException, began: float, call: Any = None, *, done: bool = False
    ) -> Reply:
        failure = RankFailure.of(error, rank=self.rank, node=self.node)
        if call is not None:
            with suppress(Exception):  # an argument whose repr raises
                inputs = describe(call)
                if inputs:
                    failure = replace(failure, message=f"{failure.message} (inputs: {inputs})")
        return Reply(
            rank=self.rank,
            failure=failure,
            done=done,
            steps=group.steps(),
            seconds=time.monotonic() - began,
        )
