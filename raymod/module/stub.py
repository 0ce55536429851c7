"""The stub: an instance of the original's class whose `forward` runs on the ranks."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raymod.calls.values import DriverValues
from raymod.errors import (
    ConfigError,
    StubClosedError,
    UnsupportedError,
)
from raymod.module.adapters import AdapterReport
from raymod.module.inputs import checked_inputs
from raymod.module.methods import stub_class
from raymod.module.record import Record
from raymod.module.sides import Contexts, LocalWeights, Method, RanksProtocol, Sides

__all__ = ["RanksProtocol", "RemoteModule", "make_stub", "restore_local"]

Self = TypeVar("Self", bound="RemoteModule")


@dataclass(kw_only=True, eq=False)
class _State:
    """What a stub has beyond what it shares with the original."""

    sides: Sides
    device: torch.device
    shared: frozenset[str]
    contexts: threading.local = field(default_factory=threading.local)
    put_back: Callable[[], None] = lambda: None
    uncompiled: Callable[..., Any] | None = None  # `forward`, out of a compiler's sight
    adapters: dict[str, AdapterReport] = field(default_factory=dict)
    closed: bool = False

    @property
    def original(self) -> nn.Module:
        """The driver's own module."""
        return self.sides.original

    @property
    def gang(self) -> RanksProtocol:
        """Its ranks."""
        return self.sides.gang

    @property
    def entered(self) -> Contexts:
        """The cache contexts that this thread is in, outermost first."""
        found: Contexts = getattr(self.contexts, "entered", ())
        return found


class RemoteModule(nn.Module):
    """Stands in for a module that runs on a gang of ranks.

    [`raymod.wrap`][raymod.api.wrap] makes it. It is an instance of the original's class too and
    shares its configuration and its local weights, which stay on the CPU; calling it runs the
    ranks' copies. What changes the model is done on every rank or refused by name; see
    `raymod.module.surface`. Used as a context manager, it closes at the end.

    Local weights that are written in place after `wrap` go to the ranks with the next call, but for
    writes through `.data`, which leave no trace.
    """

    _raymod: _State

    # -- the call ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the split module.

        Args:
            *args: As the original takes them; tensors of any device, nested in anything that
                pickles.
            **kwargs: Likewise.

        Returns:
            What the original returns, on the device of the first tensor among the inputs.

        Raises:
            StubClosedError: The stub was closed.
            UnsupportedError: An input wants gradients while gradients are on.
            PackError: An input cannot travel.
            RankError: A rank raised; also an instance of the class of what it raised.
            GangError: A rank died or did not answer in time.
        """
        state = self._open("call it")
        inputs = checked_inputs(args, kwargs)
        output = state.sides.forward(args, kwargs, state.entered)
        device = inputs[0].device if inputs else state.device
        if device.type == "cpu":
            return output
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), output)

    # -- life ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the stub was closed."""
        return self._raymod.closed

    @property
    def gang(self) -> Any:
        """The gang: `gang.call_all`, `gang.health`, `gang.report`."""
        return self._raymod.gang

    @property
    def report(self) -> Any:
        """How the gang was started: `ranks`, `phases` (seconds), `split`, `warnings`."""
        return self._raymod.gang.report

    @property
    def last_call(self) -> Any:
        """Where the time and the bytes of the last call went; None before it.

        `sent_bytes`, `reused_bytes` (there already, from an earlier call), `returned_bytes`, and
        in seconds `pack_s`, `send_s`, `compute_s`, `reply_s` and `total_s`.
        """
        return self._raymod.gang.last_call

    @property
    def adapters(self) -> Mapping[str, AdapterReport]:
        """Of each LoRA that was loaded through the stub: how many of its weights fitted."""
        return types.MappingProxyType(self._raymod.adapters)

    def health(self, timeout_s: float = 5.0) -> Any:
        """How each rank is (`state`, `busy_s`, `calls`, `rss_bytes`, `ok`), also during a call.

        Args:
            timeout_s: Limit in seconds; a rank that has not answered by then is not `ok`.

        Raises:
            GangFailedError: The gang has ended.
        """
        return self._open("answer").gang.health(timeout_s)

    def restart(self) -> None:
        """Start the ranks anew, after a failure that ended them or at any other time.

        They get the weights from where they came from, and all that has changed since.

        Raises:
            GangError: Nobody has the weights any more (`keep_local=False`), or the ranks did not
                become ready.
        """
        self._open("restart").sides.restart()

    def close(self) -> None:
        """End the ranks. The stub stays in place and says so when it is called.

        Weights freed with `keep_local=False` are not fetched back; `raymod.unwrap` does that.
        """
        self._raymod.closed = True
        self._raymod.gang.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self, what: str) -> _State:
        state = self._raymod
        if state.closed:
            raise StubClosedError(
                f"this {type(self).__name__} was closed, so nothing can {what}. raymod.unwrap the "
                f"pipeline (or use the module that was wrapped) and wrap it again."
            )
        return state

    # -- device, dtype, mode -------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device last asked for, where pipelines make their latents; nothing is there."""
        return self._raymod.device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._raymod.device = torch.device(device)

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Note the device, and change dtype and memory format here and on every rank.

        Weights do not move: the local ones stay on the CPU, the ranks' where they are.
        """
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, memory_format = parsed
        if device is not None:
            if device.type == "meta":
                raise ConfigError("to('meta') would drop the weights; use keep_local=False")
            self._raymod.device = device
        what = {"dtype": dtype, "memory_format": memory_format}
        given = {name: value for name, value in what.items() if value is not None}
        if given:
            self._change("change its dtype", "to", options={"group": "dtype"}, **given)
        return self

    def cuda(self: Self, device: int | torch.device | None = None) -> Self:
        """Note the device, as `to` does."""
        index = device if device is not None else 0
        return self.to(index if isinstance(index, torch.device) else torch.device("cuda", index))

    def xpu(self: Self, device: int | torch.device | None = None) -> Self:
        """Note the device, as `to` does."""
        index = device if device is not None else 0
        return self.to(index if isinstance(index, torch.device) else torch.device("xpu", index))

    def cpu(self: Self) -> Self:
        """Note the device, as `to` does."""
        return self.to(torch.device("cpu"))

    def half(self: Self, *args: Any) -> Self:
        """Change the dtype to float16, here and on every rank."""
        return self.to(torch.float16)

    def float(self: Self, *args: Any) -> Self:
        """Change the dtype to float32, here and on every rank."""
        return self.to(torch.float32)

    def double(self: Self) -> Self:
        """Change the dtype to float64, here and on every rank."""
        return self.to(torch.float64)

    def bfloat16(self: Self) -> Self:
        """Change the dtype to bfloat16, here and on every rank."""
        return self.to(torch.bfloat16)

    def train(self: Self, mode: bool = True) -> Self:
        """Set training or evaluation mode, here and on every rank."""
        if mode != self.training:
            options = {"group": "train", "supersedes": True}
            self._change("change its mode", "train", mode, options=options)
        return self

    def _change(
        self,
        what: str,
        method: Method,
        *args: Any,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make one change here and on every rank, or nowhere; see `Sides.change`.

        Args:
            what: What cannot be done on a closed stub.
            method: As for `Sides.change`, like `args` and `kwargs`.
            *args: Its arguments.
            options: `group`, `local` and `supersedes` of `Sides.change`.
            **kwargs: Its arguments.
        """
        state = self._open(what)
        value = state.sides.change(method, args, kwargs, **(options or {}))
        self._follow()
        return self if value is state.original else value

    def _follow(self) -> None:
        """Take over what a change has set on the original, and drop what it has deleted."""
        state = self._raymod
        now = _shared(state.original)
        for name in state.shared - now.keys():
            self.__dict__.pop(name, None)
        self.__dict__.update(now)
        state.shared = frozenset(now)

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        raise UnsupportedError(
            "this would change the local weights only; use .to(dtype), or unwrap the module first."
        )

    # -- weights -------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The local weights; fetched from rank 0 where `keep_local=False` freed them."""
        state = self._raymod
        found = state.original.state_dict(*args, **kwargs)
        if state.sides.freed is None:
            return found
        prefix = kwargs.get("prefix", "")
        values = self._open("fetch its weights").sides.fetch()
        for name in found:
            if name.removeprefix(prefix) in values:
                found[name] = values[name.removeprefix(prefix)]
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the driver's module."""
        self._raymod.sides.expose()
        return self._raymod.original.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the driver's module."""
        self._raymod.sides.expose()
        return self._raymod.original.named_buffers(*args, **kwargs)

    # -- parts ---------------------------------------------------------------------------------
    # Whoever gets one may change it; see `raymod.module.watch`.

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The stub, and the parts of the driver's module."""
        self._raymod.sides.expose()
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts of the driver's module; none for what offloads, which has nothing to do."""
        if type(self.__dict__.get("_hf_hook")).__name__ in _OFFLOADS_PARTS:
            return iter(())
        self._raymod.sides.expose()
        children: Iterator[tuple[str, nn.Module]] = super().named_children()
        return children

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_modules", ()):
            self._raymod.sides.expose()
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"RemoteModule({type(self).__name__}), a raymod stub, has no attribute {name!r}: "
                f"it does not exist on the module that runs on the ranks either",
                name=name,
                obj=self,
            ) from error

    # -- the rest of being a module ------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            raise UnsupportedError(
                f"{type(self).__name__}.{name} cannot be replaced while the module runs on "
                f"raymod's ranks: raymod.unwrap it, change it, and wrap it again."
            )
        # private names and `forward` are where hooks (accelerate, diffusers) keep their own state
        is_local = (name.startswith("_") and name != "_internal_dict") or name == "forward"
        if not is_local and not isinstance(getattr(type(self), name, None), property):
            options = {"group": f".{name}", "supersedes": True}
            self._change(f"set its {name}", setattr, name, value, options=options)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if not (name.startswith("_") or name == "forward"):
            raise UnsupportedError(
                f"{type(self).__name__}.{name} cannot be deleted while the module runs on "
                f"raymod's ranks: raymod.unwrap it first."
            )
        object.__delattr__(self, name)

    def __repr__(self) -> str:
        state = self._raymod
        what = "closed" if state.closed else state.gang.report.split
        return f"RemoteModule({type(self).__name__}, {what})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"a raymod stub ({type(self).__name__}) cannot be pickled or copied: its ranks belong "
            f"to this process. raymod.unwrap the pipeline first, or share the stub itself."
        )


def make_stub(
    original: nn.Module,
    gang: RanksProtocol,
    *,
    device: torch.device,
    freed: LocalWeights | None = None,
    from_local: bool = True,
    put_back: Callable[[], None] = lambda: None,
    cache: Any = None,
    values: DriverValues | None = None,
) -> RemoteModule:
    """A stub for `original`; nothing is set on `original` itself.

    Args:
        original: The driver's module.
        gang: Its ranks.
        device: Where the module was.
        freed: Its weights, where they were freed.
        from_local: Whether ranks that are started anew would load `original` as it stands then;
            see `Record`.
        put_back: Called when `original` is itself again: puts its offloading back on.
        cache: The config of the step cache that the ranks were prepared with.
        values: What only the driver knows, and sends with each call.
    """
    kind: Any = type(original)
    cls: Any = stub_class(kind, RemoteModule)
    stub: RemoteModule = cls.__new__(cls)
    # the dicts of parameters, buffers and submodules are shared, so both see the same weights
    shared = _shared(original)
    stub.__dict__.update(shared)
    stub.__dict__["_raymod"] = _State(
        sides=Sides(original, gang, Record(from_local=from_local), freed, values),
        device=device,
        shared=frozenset(shared),
        put_back=put_back,
    )
    if cache is not None:
        stub.__dict__["_cache_config"] = cache
    return stub


# What accelerate puts on a module, last, before it goes on to its parts.
_OFFLOADS_PARTS = ("AlignDevicesHook", "SequentialHook")
_HOOKS = ("_compiled_call_impl", "_diffusers_hook", "_hf_hook", "_old_forward", "hf_device_map")


def _shared(original: nn.Module) -> dict[str, Any]:
    """What a stub takes over: all but what would lead a call past it, to the local module.

    Offload and compile set `forward` and others on the instance, where they win over the class.
    """
    return {
        name: value
        for name, value in vars(original).items()
        if name not in _HOOKS and not callable(getattr(RemoteModule, name, None))
    }


def restore_local(stub: RemoteModule) -> nn.Module:
    """The original of `stub`, with its weights fetched back and its offloading put back on."""
    state = stub._raymod
    state.sides.restore(closed=state.closed)
    put_back, state.put_back = state.put_back, lambda: None
    put_back()
    return state.original
