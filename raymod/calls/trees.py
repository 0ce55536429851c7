"""Nested containers: lists, tuples, mappings and dataclasses, taken apart by key and rebuilt."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch

__all__ = [
    "Path",
    "hidden_items",
    "items",
    "map_tensors",
    "rebuilt",
    "relisted",
    "same",
    "tensors",
    "walk",
]

Path = tuple[Hashable, ...]


def items(value: Any) -> dict[Hashable, Any] | None:
    """What is in a container, by key: an index, a key, a field's name. None if it is none."""
    if isinstance(value, torch.Tensor):  # most of what is asked about
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return None


def hidden_items(value: Any) -> dict[Hashable, Any] | None:
    """What is in an object that compares by its address only, such as a function; else None."""
    equal: Any = type(value).__eq__
    if equal is object.__eq__ or isinstance(value, MethodType):
        return dict(getattr(value, "__dict__", {}))
    return None


def rebuilt(like: Any, values: Mapping[Hashable, Any]) -> Any:
    """A container of the type of `like` that holds `values` under the same keys."""
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        made: Any = copy.copy(like)
        for name, value in values.items():
            object.__setattr__(made, str(name), value)
        if isinstance(made, dict):  # a dict as well, that shows the fields which are set
            for name in made:
                dict.__setitem__(made, name, values[name])
        return made
    if isinstance(like, dict):
        made = copy.copy(like)
        for key, value in values.items():
            made[key] = value
        return made
    if isinstance(like, Mapping):
        return dict(values)
    return relisted(like, list(values.values()))


def relisted(like: Any, values: list[Any]) -> Any:
    """`values` as a list or tuple of the type of `like`."""
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*values)
    return type(like)(values)


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every node of a tree with its path, parents first."""
    yield path, value
    for key, child in (items(value) or {}).items():
        yield from walk(child, (*path, key))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a tree."""
    return (node for _, node in walk(value) if isinstance(node, torch.Tensor))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tree with new containers and every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    inside = items(value)
    if inside is None:
        return value
    return rebuilt(value, {key: map_tensors(child, change) for key, child in inside.items()})


def same(one: Any, other: Any) -> bool:
    """Whether two objects without tensors are equal; False where they do not say."""
    try:
        return one is other or bool(one == other)
    except Exception:
        return False
