"""Which part of an object is to blame when the whole does not pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["find_fault", "is_call", "type_name"]

_MAX_DEPTH = 100


def find_fault(
    obj: Any, path: str, fails: Callable[[Any], bool], state_of: Callable[[nn.Module], Any]
) -> tuple[str, Any]:
    """The innermost part of `obj` that fails, and the path to it.

    Args:
        obj: An object for which `fails` holds.
        path: What to call it.
        fails: Whether a part fails by itself.
        state_of: The part of a module that would travel.
    """
    seen = {id(obj)}
    for _ in range(_MAX_DEPTH):
        for step, part in _parts(obj, state_of):
            if id(part) not in seen and fails(part):
                seen.add(id(part))
                obj, path = part, path + step
                break
        else:
            break
    return path.lstrip("."), obj


def is_call(obj: Any) -> bool:
    """Whether `obj` is the `(args, kwargs)` of a call, perhaps with cache contexts and seat."""
    return (
        type(obj) is tuple
        and (len(obj) == 2 or (len(obj) == 4 and type(obj[2]) is tuple and type(obj[3]) is int))
        and type(obj[0]) is tuple
        and type(obj[1]) is dict
        and all(isinstance(name, str) for name in obj[1])
    )


def type_name(obj: Any) -> str:
    """The type of `obj` as one would write it."""
    kind = type(obj)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name.removeprefix("builtins.").replace("torch._C.", "torch.")


def _parts(obj: Any, state_of: Callable[[nn.Module], Any]) -> Iterator[tuple[str, Any]]:
    """What `obj` holds, each with the text that leads to it."""
    if is_call(obj):
        yield from zip(("args", "kwargs", "contexts"), obj, strict=False)
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"[{key!r}]", value
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        for name, value in zip(obj._fields, obj, strict=False):
            yield f".{name}", value
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, (set, frozenset)):
        for value in obj:
            yield f"[{value!r}]", value
    elif isinstance(obj, nn.Module):
        yield from _parts_of_module(state_of(obj))
    elif isinstance(obj, FunctionType):
        yield from _parts_of_function(obj)
    elif isinstance(obj, MethodType):
        yield ".__self__", obj.__self__
    else:
        yield from _attributes(obj)


def _parts_of_module(state: Any) -> Iterator[tuple[str, Any]]:
    state = dict(state) if isinstance(state, Mapping) else {}
    for name in ("_modules", "_parameters", "_buffers"):
        for key, value in state.pop(name, {}).items():
            yield f".{key}", value
    for key, value in state.items():
        yield f".{key}", value


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function that travels by value takes along."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not yet filled
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield f".{name}", function.__globals__[name]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{index}]", value


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, type):
        return
    names = [f.name for f in dataclasses.fields(obj)] if dataclasses.is_dataclass(obj) else []
    values = {name: getattr(obj, name) for name in names if hasattr(obj, name)}
    for name, value in {**values, **getattr(obj, "__dict__", {})}.items():
        yield f".{name}", value
