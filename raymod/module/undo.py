"""A module's state before a change, so that the change can be taken back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Snapshot", "overwritten"]

_CONTAINERS = (dict, OrderedDict, list, set)
# Of objects of these packages (hooks, processors, adapter configs) the attributes are kept too.
_LOOKED_INTO = ("diffusers.", "peft.", "accelerate.")


class Snapshot:
    """What a module is made of, and what its parts hold, without a copy of the weights.

    Kept are every part's attributes, the containers among them, the state of diffusers' and
    PEFT's own objects, and which memory each weight uses. So everything can be brought back that
    is changed by putting something else in its place: parts, hooks, processors, adapters, dtypes.
    Weights that are written in place have to be named.
    """

    def __init__(self, module: nn.Module, overwritten: Iterable[torch.Tensor] = ()) -> None:
        """Keep the state of `module`.

        Args:
            module: The module.
            overwritten: Weights that the change writes in place; they are copied to the CPU.
        """
        self._kept: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for part in module.modules():
            self._keep(part.__dict__)
        weights = [*module.parameters(), *module.buffers()]
        self._memory = [(tensor, tensor.data) for tensor in weights]
        self._copies = [
            (tensor.data, tensor.detach().to("cpu", copy=True))
            for tensor in {id(tensor): tensor for tensor in overwritten}.values()
            if not tensor.is_meta
        ]

    def restore(self) -> None:
        """Bring everything back that was kept."""
        for holder, kept in self._kept:
            holder.clear()
            holder.extend(kept) if isinstance(holder, list) else holder.update(kept)
        for tensor, data in self._memory:
            tensor.data = data
        for data, copy in self._copies:
            data.copy_(copy)

    def _keep(self, holder: Any) -> None:
        if id(holder) in self._seen:
            return
        self._seen.add(id(holder))
        self._kept.append((holder, holder.copy()))
        for value in list(holder.values() if isinstance(holder, dict) else holder):
            if type(value) in _CONTAINERS:
                self._keep(value)
            elif _is_looked_into(value):
                self._keep(value.__dict__)


def _is_looked_into(value: Any) -> bool:
    return (
        not isinstance(value, (nn.Module, torch.Tensor, type))
        and type(value).__module__.startswith(_LOOKED_INTO)
        and isinstance(getattr(value, "__dict__", None), dict)
    )


def overwritten(
    module: nn.Module,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Iterator[torch.Tensor]:
    """The weights of `module` that a change writes in place."""
    if method in ("fuse_lora", "unfuse_lora"):
        for part in _adapted(module):
            yield from part.get_base_layer().parameters()
    elif getattr(method, "__name__", "") == "make_differences":
        for one in args[0]:
            if one.name == "merged_adapters":
                changed: Any = module.get_submodule(one.path)
                yield from changed.get_base_layer().parameters()
    elif method == "load_state_dict":
        named = args[0] if args else kwargs.get("state_dict", {})
        yield from (tensor for name, tensor in _tensors(module) if name in named)
    elif method == "load_lora_adapter" and kwargs.get("hotswap"):
        for part in _adapted(module):
            yield from part.parameters()


def _adapted(module: nn.Module) -> Iterator[Any]:
    """The parts of `module` that PEFT has put adapters into."""
    return (part for part in module.modules() if hasattr(part, "get_base_layer"))


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
