"""The batch split: which parts of a call are divided by sample.

A call does not say which of its tensors and lists carry the batch. The likely ones are proposed
here, most likely first; what is right is for the check against the whole model to say.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from raymod.calls.trees import Path, items, rebuilt, relisted

__all__ = ["BatchCut", "batch_size", "batch_sizes", "candidates", "cut_call", "size_under"]

Call = tuple[tuple[Any, ...], dict[str, Any]]

MAX_CANDIDATES = 32


@dataclass(frozen=True)
class BatchCut:
    """What of a call is divided by sample, by path: `(0, index)` or `(1, name)` and inwards.

    Attributes:
        tensors: Tensors, along their first dim.
        lists: Lists and tuples with one entry a sample.
    """

    tensors: frozenset[Path]
    lists: frozenset[Path]


def batch_sizes(call: Call) -> list[int]:
    """The numbers of samples that the call may have, most likely first.

    Every argument has a vote: a tensor for its first dim, a list of tensors for its length and
    for their common first dim, another list for its length. The first tensor, which is the
    sample as a rule, has two.
    """
    arguments = [*call[0], *call[1].values()]
    votes: Counter[int] = Counter()
    for argument in arguments:
        votes.update(_votes(argument))
    votes.update(next((_votes(x) for x in arguments if isinstance(x, torch.Tensor)), set()))
    first_seen = list(votes)
    return sorted(first_seen, key=lambda size: (-votes[size], first_seen.index(size)))


def batch_size(call: Call) -> int:
    """The most likely number of samples in the call; 1 where nothing says one."""
    return (batch_sizes(call) or [1])[0]


def candidates(call: Call, batch: int) -> Iterator[BatchCut]:
    """Ways to divide a call of `batch` samples, the most likely first and not too many.

    The first takes everything that looks like a batch; the others decide differently about one
    or two places, since a dim or a length can equal the batch by chance.
    """
    base = _Finder(batch, frozenset())
    base.visit(call)
    places = base.places[1:] + base.places[:1]  # the first tensor is the least doubtful
    flips = itertools.chain([()], ((p,) for p in places), itertools.combinations(places, 2))
    seen: set[BatchCut] = set()
    for flipped in flips:
        finder = _Finder(batch, frozenset(flipped))
        finder.visit(call)
        cut = finder.cut()
        if cut not in seen and (cut.tensors or cut.lists):
            seen.add(cut)
            yield cut
        if len(seen) == MAX_CANDIDATES:
            return


def size_under(call: Call, cut: BatchCut) -> int:
    """Number of samples in the call, read where `cut` divides it."""
    path = min([*cut.tensors, *cut.lists], key=lambda path: (len(path), str(path)))
    value: Any = call
    for key in path:
        value = (items(value) or {})[key]
    return int(value.shape[0]) if isinstance(value, torch.Tensor) else len(value)


def cut_call(call: Call, cut: BatchCut, start: int, stop: int) -> Call:
    """The call for the samples from `start` to `stop`; tensors are views of the whole ones."""
    part: Call = _cut(call, (), cut, start, stop)
    return part


def _cut(value: Any, path: Path, cut: BatchCut, start: int, stop: int) -> Any:
    if path in cut.tensors:
        return value[start:stop]
    if path in cut.lists:
        return relisted(value, list(value[start:stop]))
    inside = items(value)
    if inside is None:
        return value
    changed = {key: _cut(child, (*path, key), cut, start, stop) for key, child in inside.items()}
    return rebuilt(value, changed)


class _Finder:
    """Collects what looks like a batch of a given size, with some places decided the other way."""

    def __init__(self, batch: int, flipped: frozenset[Path]) -> None:
        self.batch = batch
        self.flipped = flipped
        self.places: list[Path] = []
        self._tensors: list[Path] = []
        self._lists: list[Path] = []

    def cut(self) -> BatchCut:
        return BatchCut(frozenset(self._tensors), frozenset(self._lists))

    def visit(self, value: Any, path: Path = ()) -> None:
        if isinstance(value, torch.Tensor):
            if value.ndim and value.shape[0] == self.batch and self._decide(path, True):
                self._tensors.append(path)
            return
        is_long = isinstance(value, (list, tuple)) and len(path) > 1 and len(value) == self.batch
        if is_long and self._decide(path, _one_a_sample(value, self.batch)):
            self._lists.append(path)
            return
        for key, child in (items(value) or {}).items():
            self.visit(child, (*path, key))

    def _decide(self, path: Path, likely: bool) -> bool:
        self.places.append(path)
        return likely != (path in self.flipped)


def _one_a_sample(value: list[Any] | tuple[Any, ...], batch: int) -> bool:
    """Whether a list as long as the batch is likely to have one entry a sample."""
    if all(isinstance(entry, torch.Tensor) for entry in value):
        return not all(entry.ndim and entry.shape[0] == batch for entry in value)
    if isinstance(value, tuple):  # a scale for each axis, a size
        return not all(entry is None or isinstance(entry, (int, float, str)) for entry in value)
    return True


def _votes(argument: Any) -> set[int]:
    if isinstance(argument, torch.Tensor):
        return {argument.shape[0]} if argument.ndim else set()
    if isinstance(argument, list) and argument:
        firsts = {x.shape[0] for x in argument if isinstance(x, torch.Tensor) and x.ndim}
        return {len(argument)} | (firsts if len(firsts) == 1 else set())
    return set()
