"""What makes two calls of one kind: a split that was right for one is right for the other.

Sizes do not count, except whether there is a batch. What does: which arguments there are and
which are None, types, numbers of dims, plain values, whether a mask masks anything, and the modes
of torch, such as autocast.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from raymod.calls.modes import modes
from raymod.calls.trees import items, walk
from raymod.parallel.batch import Call, batch_size, candidates

__all__ = ["kind_of", "sizes_of"]


def kind_of(
    call: Call, parameters: Sequence[str], *, by_batch: bool, values: bool = True
) -> Hashable:
    """The kind of a call, the same on all ranks that get the call.

    Args:
        call: Its arguments.
        parameters: Names of the parameters that positional arguments are for.
        by_batch: Whether the batch may be divided: then it counts what looks like a batch.
        values: Whether plain integers count by value.
    """
    batch = batch_size(call)
    cut: Hashable = None
    if by_batch and batch > 1:
        cut = next(candidates(call, batch), None)
    named = dict(zip([*parameters, *map(str, range(len(call[0])))], call[0], strict=False))
    arguments = sorted((named | call[1]).items())
    nodes = tuple((name, _node(value, name, values)) for name, value in arguments)
    return batch > 1, cut, nodes, tuple(modes().items())


def sizes_of(call: Call) -> Hashable:
    """The shapes of all tensors and the lengths of all lists of a call."""
    return tuple(
        tuple(node.shape) if isinstance(node, torch.Tensor) else len(node)
        for _, node in walk(call)
        if isinstance(node, (torch.Tensor, list, tuple))
    )


def _node(value: Any, name: str, values: bool) -> Hashable:
    if isinstance(value, torch.Tensor):
        may_mask = not value.is_floating_point() or "mask" in name
        return str(value.dtype), value.ndim, may_mask and _is_even(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return ("int", value) if values else "int"
    inside = items(value)
    if inside is None:  # a float, which changes with every step, or something unknown
        return type(value).__qualname__
    if isinstance(value, list):  # a list may be as long as the batch, or hold a size a sample
        entries = dict.fromkeys(_node(entry, name, values) for entry in value)
        return ("list", *entries)
    named = ((str(key), child) for key, child in inside.items())
    return type(value).__qualname__, *(
        (key, _node(child, key if isinstance(value, dict) else name, values))
        for key, child in named
    )


def _is_even(mask: torch.Tensor) -> bool:
    """Whether all entries of a mask are equal, and so mask nothing or everything."""
    return mask.numel() == 0 or bool((mask == mask.reshape(-1)[0]).all())
