"""Changes of the driver's parts that went past the stub: noticed, and made on the ranks too.

Pipelines take parts out of a transformer and change these: they unfuse adapters layer by layer,
set the scale of attention processors, replace blocks. On a stub that would change the driver's
side alone, where nothing runs. So once a part has been given out, the parts are compared with what
they were before each call, and what differs goes to the ranks. Weights that are written in place
are not noticed.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class _Part:
    """What a part was: its attributes, its children and weights, and how many hooks it had."""

    part: nn.Module
    attributes: dict[str, Any]
    held: dict[str, Any]
    hooks: tuple[int, int]


class Watch:
    """Knows what the parts of a module were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: dict[str, _Part] = {}
        self.note()

    def note(self) -> None:
        """Take the module as it stands for what it was."""
        self._parts = {
            path: _Part(part, _attributes(part), _held(part), _hooks(part))
            for path, part in self._module.named_modules(remove_duplicate=False)
        }

    def differences(self) -> list[Difference]:
        """What is not what it was.

        Raises:
            UnsupportedError: A hook was put on a part; it would not run.
        """
        found: list[Difference] = []
        for path, part in self._module.named_modules(remove_duplicate=False):
            was = self._parts.get(path)
            if was is None or was.part is not part:
                continue  # its parent tells
            held, attributes = _held(part), _attributes(part)
            for name in {**was.held, **held}:
                if was.held.get(name, _GONE) is not held.get(name, _GONE):
                    gone = name not in held
                    found.append(Difference(path, name, held.get(name), gone=gone))
            if attributes != was.attributes:
                found.extend(_changed(path, part, was.attributes, attributes))
            if path and _hooks(part) != was.hooks:
                raise UnsupportedError(
                    f"a hook was put on {path}, a part of a module that runs on raymod's ranks, "
                    f"where the hook would not run. Remove it; put hooks on the whole module, or "
                    f"on the ranks' parts with raymod.PrepareConfig(extra=...)."
                )
        return found


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


def _changed(
    path: str, part: nn.Module, was: dict[str, Any], now: dict[str, Any]
) -> Iterator[Difference]:
    for name in {**was, **now}:
        if was.get(name, _GONE) != now.get(name, _GONE):
            yield Difference(path, name, part.__dict__.get(name), gone=name not in now)


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: _frozen(v) for name, v in part.__dict__.items() if name not in _SKIPPED}


def _held(part: nn.Module) -> dict[str, Any]:
    return {**part._parameters, **part._buffers, **part._modules}


def _hooks(part: nn.Module) -> tuple[int, int]:
    return len(part._forward_hooks), len(part._forward_pre_hooks)


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
