"""Changes of the driver's parts that went past the stub: noticed, and made on the ranks too.

Pipelines take parts out of a transformer and change these: they unfuse adapters layer by layer,
set the scale of attention processors, replace blocks. On a stub that would change the driver's
side alone, where nothing runs. So once a part has been given out, the parts are compared with what
they were before each call, and what differs goes to the ranks: weights too, by the count that torch
keeps of writes to a tensor. Writes past that count, through `.data` or NumPy, are not noticed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymod.errors import UnsupportedError

__all__ = ["Difference", "Watch", "config_of", "make_differences", "set_config"]

_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_compiled_call_impl", "_diffusers_hook", "_hf_hook", "_old_forward", "forward")
_SKIPPED = _TORCHS | frozenset(_HOOKS)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DENSE = (torch.Tensor, nn.Parameter)
_GONE = object()


@dataclass(frozen=True)
class Difference:
    """One thing that is not what it was.

    Attributes:
        path: The part.
        name: Its attribute, or child.
        value: What it is now.
        gone: Whether it was deleted.
    """

    path: str
    name: str
    value: Any = None
    gone: bool = False


class _Part:
    """What a part was."""

    def __init__(self, path: str, part: nn.Module) -> None:
        self.path = path
        self.part = part
        self.attributes = dict(part.__dict__)
        self.held = _held(part)
        # what may change inside while it stays the same object
        self.inside = {
            name: _frozen(value)
            for name, value in self.attributes.items()
            if name not in _SKIPPED and not _is_plain(value)
        }
        self.hooks = _hooks(part)

    def is_same_inside(self) -> bool:
        """Whether what may change inside has not."""
        now = self.part.__dict__
        return all(_frozen(now[name]) == was for name, was in self.inside.items())

    def differences(self) -> Iterator[Difference]:
        """What has changed."""
        held = _held(self.part)
        for name in {**self.held, **held}:
            if self.held.get(name, _GONE) is not held.get(name, _GONE):
                yield Difference(self.path, name, held.get(name), gone=name not in held)
        now = self.part.__dict__
        for name in {**self.attributes, **now}:
            if name not in _SKIPPED and not self._is_equal(name, now):
                yield Difference(self.path, name, now.get(name), gone=name not in now)
        if self.path and _hooks(self.part) != self.hooks:
            raise UnsupportedError(
                f"a hook or a forward was set on {self.path}, a part of a module that runs on "
                f"raymod's ranks, where it would not run. Remove it; put hooks on the whole "
                f"module, or on the ranks' parts with raymod.PrepareConfig(extra=...)."
            )

    def _is_equal(self, name: str, now: dict[str, Any]) -> bool:
        if name not in now or name not in self.attributes:
            return False
        if name in self.inside:
            return bool(_frozen(now[name]) == self.inside[name])
        was = self.attributes[name]
        return now[name] is was or (_is_plain(now[name]) and bool(now[name] == was))


class _Weight:
    """What a weight was."""

    def __init__(self, path: str, name: str, tensor: torch.Tensor) -> None:
        self.path = path
        self.name = name
        self.tensor = tensor
        self.mark = _mark(tensor)
        self.data = tensor.detach()  # held, or its address could be that of what comes after it


class Watch:
    """Knows what the parts of a module were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[_Part] = []
        self.note()

    def note(self) -> None:
        """Take the module as it stands for what it was."""
        self._parts = [_Part(path, part) for path, part in self._module.named_modules()]
        self._with_insides = [part for part in self._parts if part.inside]
        self._weights = [
            _Weight(part.path, name, held)
            for part in self._parts
            for name, held in part.held.items()
            if isinstance(held, torch.Tensor)
        ]
        self._dicts = [held for part in self._parts for held in _dicts(part.part)]
        self._values = self._now()

    def differences(self) -> list[Difference]:
        """What is not what it was.

        Raises:
            UnsupportedError: A hook was put on a part; it would not run.
        """
        # before every call, so the usual case has to be quick: nothing was replaced
        now = self._now()
        if (
            len(now) == len(self._values)
            and all(map(operator.is_, now, self._values))
            and all(part.is_same_inside() for part in self._with_insides)
            and all(_mark(weight.tensor) == weight.mark for weight in self._weights)
        ):
            return []
        there = {id(part) for part in self._module.modules()}  # of the others their parents tell
        found = [
            one for part in self._parts if id(part.part) in there for one in part.differences()
        ]
        return [*found, *self._written(found)]

    def _written(self, found: list[Difference]) -> Iterator[Difference]:
        """Weights that are the same object and hold something else."""
        merged = tuple(f"{one.path}." for one in found if one.name == "merged_adapters")
        parts = dict(self._module.named_modules())
        for weight in self._weights:
            path, name, tensor = weight.path, weight.name, weight.tensor
            if _mark(tensor) == weight.mark or f"{path}.".startswith(merged):
                continue  # the ranks merge adapters themselves
            if path not in parts or _held(parts[path]).get(name) is not tensor:
                continue  # replaced, which is a difference of its own
            if tensor.is_meta:
                raise UnsupportedError(
                    f"{path or 'the module'}.{name} was written to, but this process holds no "
                    f"weights: they are on raymod's ranks, where the write did not happen. Use the "
                    f"whole stub's load_state_dict(weights, strict=False)."
                )
            yield Difference(path, name, tensor)

    def _now(self) -> list[Any]:
        """Everything that the parts hold, as it is in their dicts."""
        return list(itertools.chain.from_iterable(map(dict.values, self._dicts)))


def config_of(module: nn.Module) -> dict[str, Any]:
    """What is set on the module's configuration: diffusers' own code changes it in place."""
    config = getattr(module, "_internal_dict", None)
    return dict(getattr(config, "__dict__", None) or {})


def set_config(module: nn.Module, values: dict[str, Any]) -> None:
    """Set values on the configuration of a rank's module, as was done on the driver's."""
    config = getattr(module, "_internal_dict", None)
    for name, value in values.items():
        setattr(config, name, value)


def make_differences(module: nn.Module, differences: list[Difference]) -> None:
    """Make on a rank's module what was done to the driver's."""
    merged = [one for one in differences if one.name == "merged_adapters"]
    parts: dict[str, Any] = {one.path: module.get_submodule(one.path) for one in differences}
    for one in merged:
        parts[one.path].unmerge()
    for one in differences:
        if one.name == "merged_adapters":
            continue
        if one.gone:
            delattr(parts[one.path], one.name)
        else:
            setattr(parts[one.path], one.name, one.value)
    for one in merged:
        if one.value:
            parts[one.path].merge(adapter_names=list(one.value))


def _held(part: nn.Module) -> dict[str, Any]:
    return {**part._parameters, **part._buffers, **part._modules}


def _dicts(part: nn.Module) -> tuple[dict[str, Any], ...]:
    hooks: tuple[Any, ...] = (part._forward_hooks, part._forward_pre_hooks)
    return (part.__dict__, part._parameters, part._buffers, part._modules, *hooks)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _hooks(part: nn.Module) -> tuple[int, int, int]:
    own = part.__dict__.get("forward")  # set on the instance, it wins over the class
    return len(part._forward_hooks), len(part._forward_pre_hooks), id(own)


def _mark(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """What a write to a tensor, or a change of its `data`, changes."""
    version = 0 if tensor.is_inference() else tensor._version
    plain = type(tensor) in _DENSE and tensor.layout is torch.strided
    return version, tensor.data_ptr() if plain else 0, tensor.dtype


def _frozen(value: Any, depth: int = 0) -> Any:
    """Something equal to what comes of `value` later only if it still holds the same."""
    if isinstance(value, _PLAIN):
        return value
    if depth > 3:
        return id(value)
    if isinstance(value, (list, tuple)):
        return [type(value), *(_frozen(item, depth + 1) for item in value)]
    if isinstance(value, dict):
        inside = {key: _frozen(item, depth + 1) for key, item in value.items()}
        return [type(value), inside, _inside(value, depth)]
    if isinstance(value, (set, frozenset)):
        return [type(value), set(value)]
    if isinstance(value, (nn.Module, torch.Tensor, type)) or (callable(value) and depth):
        return id(value)
    return [id(value), _inside(value, depth)]


def _inside(value: Any, depth: int) -> Any:
    """The attributes of a plain object, such as an attention processor."""
    inside = getattr(value, "__dict__", None)
    if not isinstance(inside, dict):
        return None
    return {name: _frozen(item, depth + 1) for name, item in inside.items()}
