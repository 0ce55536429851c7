"""How the outputs of several ranks, each for its part of the batch, become one output.

Which tensors carry the batch, and along which dim, is found once, by comparing the shapes of a
part with those of the whole; the description travels to the driver, which does the joining.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from raymod.calls.trees import hidden_items, items, rebuilt, relisted, same

__all__ = ["Join", "find_join", "guess_join", "join", "take"]

_Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Join:
    """How one object is put together from its parts.

    Attributes:
        how: `cat`: tensors or arrays are concatenated along `dim`. `chain`: lists of samples are
            chained. `each`: a container, whose items are joined by `items`. `same`: equal in all
            parts.
        dim: The dim of the batch, for `cat`.
        items: Pairs of key and Join, for `each`: an index, a dict's key, a field's name.
    """

    how: Literal["cat", "chain", "each", "same"]
    dim: int = 0
    items: tuple[tuple[Hashable, Join], ...] = ()


def find_join(whole: Any, part: Any, *, batch: int, own: int) -> Join | None:
    """How parts like `part` become `whole`, judged by types and shapes alone.

    Args:
        whole: The output for the whole batch.
        part: The output for a part of the batch.
        batch: Samples in the whole batch.
        own: Samples in the part, fewer than `batch`.

    Returns:
        The description, or None if `part` does not fit.
    """
    if type(whole) is not type(part):
        return None
    if isinstance(whole, (torch.Tensor, np.ndarray)):
        return _find_dim(whole, part, batch, own)
    if isinstance(whole, (list, tuple)) and (len(whole), len(part)) == (batch, own):
        return Join("chain")
    inside, others = items(whole), items(part)
    if inside is not None and others is not None:
        return _find_each(inside, others, batch, own)
    return Join("same") if _are_alike(whole, part, set()) else None


def guess_join(part: Any, *, own: int) -> Join:
    """How parts like `part` go together, where there is no whole one to compare with.

    Tensors whose first dim is the batch are concatenated, lists of other tensors chained;
    everything else counts as equal in all parts.
    """
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return Join("cat") if part.ndim and part.shape[0] == own else Join("same")
    if isinstance(part, list) and len(part) == own and _are_samples(part, own):
        return Join("chain")
    inside = items(part)
    if inside is None:
        return Join("same")
    return Join("each", items=tuple((key, guess_join(x, own=own)) for key, x in inside.items()))


def join(parts: Sequence[Any], how: Join) -> Any:
    """The whole from its `parts`, in the order of the batch.

    Returns:
        An object of the type of the parts. What is equal in all parts is that of the first.
    """
    first = parts[0]
    if how.how == "cat":
        if isinstance(first, np.ndarray):
            return np.concatenate(tuple(parts), axis=how.dim)
        return torch.cat(tuple(parts), dim=how.dim)
    if how.how == "chain":
        return relisted(first, [sample for part in parts for sample in part])
    if how.how == "same":
        return first
    pieces = [items(part) or {} for part in parts]
    return rebuilt(first, {key: join([p[key] for p in pieces], sub) for key, sub in how.items})


def take(whole: Any, how: Join, *, start: int, stop: int, batch: int) -> Any:
    """The part of `whole` for the samples from `start` to `stop`: the reverse of `join`."""
    if how.how == "cat":
        each = whole.shape[how.dim] // batch
        return whole[(slice(None),) * how.dim + (slice(start * each, stop * each),)]
    if how.how == "chain":
        return relisted(whole, list(whole[start:stop]))
    if how.how == "same":
        return whole
    inside = items(whole) or {}
    part = {
        key: take(inside[key], sub, start=start, stop=stop, batch=batch) for key, sub in how.items
    }
    return rebuilt(whole, part)


def _find_dim(whole: _Array, part: _Array, batch: int, own: int) -> Join | None:
    if whole.dtype != part.dtype or whole.ndim != part.ndim:
        return None
    differing = [dim for dim in range(whole.ndim) if whole.shape[dim] != part.shape[dim]]
    if not differing:
        return Join("same")
    dim = differing[0]
    fits = whole.shape[dim] * own == part.shape[dim] * batch and whole.shape[dim] % batch == 0
    return Join("cat", dim=dim) if len(differing) == 1 and fits else None


def _find_each(
    inside: Mapping[Hashable, Any], others: Mapping[Hashable, Any], batch: int, own: int
) -> Join | None:
    if list(inside) != list(others):
        return None
    found: list[tuple[Hashable, Join]] = []
    for key, value in inside.items():
        how = find_join(value, others[key], batch=batch, own=own)
        if how is None:
            return None
        found.append((key, how))
    return Join("each", items=tuple(found))


def _are_alike(whole: Any, part: Any, seen: set[int]) -> bool:
    """Whether two objects are the same for all samples, which those are that hold nothing else."""
    if type(whole) is not type(part):
        return False
    if isinstance(whole, torch.Tensor):
        return bool(whole.shape == part.shape and whole.dtype == part.dtype)
    inside, others = items(whole), items(part)
    if inside is None or others is None:
        if same(whole, part) or id(whole) in seen:
            return True
        inside, others = hidden_items(whole), hidden_items(part)
    seen.add(id(whole))
    if inside is None or others is None or list(inside) != list(others):
        return False
    return all(_are_alike(value, others[key], seen) for key, value in inside.items())


def _are_samples(entries: list[Any], own: int) -> bool:
    """Whether the tensors of a list are one a sample, rather than a batch each."""
    if not all(isinstance(entry, torch.Tensor) for entry in entries):
        return False
    shapes = {tuple(entry.shape) for entry in entries}
    return len(shapes) > 1 or shapes.pop()[:1] != (own,)
