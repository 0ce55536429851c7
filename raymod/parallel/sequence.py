"""One rank's side of a sequence split: what is cut, and what the other ranks have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from raymod.errors import SplitError
from raymod.parallel.exchange import gather, gather_numbers
from raymod.parallel.mesh import part_sizes, part_start
from raymod.plans import Cut

__all__ = ["SequenceContext", "TooFewTokensError"]

MAX_SCHEDULES = 64
MAX_DIMS = 8


# What each rank said, by the parts that have run before and the place in the order since.
_Schedule = dict[tuple[int, int], list[tuple[int, ...]]]


class TooFewTokensError(SplitError):
    """A tensor has fewer tokens than there are ranks to divide them over."""


class SequenceContext:
    """One rank's side of a sequence split.

    Attention processors carry it as their `_parallel_config`.

    Attributes:
        group: The ranks that share the sequence.
        rank: This rank's place in the group.
        degree: Number of ranks in the group.
        active: Whether calls are split now.
        cuts: Numbers of tokens that were cut in this call, before the cut.
        hooks: Number of cuts and gathers placed in the module.
        attentions: Number of attention processors that carry the context.
        undo: What takes all of them off the module again.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.degree = dist.get_world_size(group)
        self.active = False
        self.cuts: set[int] = set()
        self.hooks = 0
        self.attentions = 0
        self.undo: list[Callable[[], None]] = []
        self._schedules: OrderedDict[Hashable, _Schedule] = OrderedDict()
        self._schedule: _Schedule = {}
        self._path = 0
        self._step = 0

    @contextmanager
    def on(self, key: Hashable) -> Iterator[None]:
        """Split the calls made inside.

        Args:
            key: Equal for calls of equal shapes, and the same on all ranks of the group.
        """
        self._schedule = self._schedules.pop(key, {})
        self._path = self._step = 0
        self.cuts = set()
        self.active = True
        try:
            yield
        finally:
            self.active = False
        self._schedules[key] = self._schedule
        while len(self._schedules) > MAX_SCHEDULES:
            self._schedules.popitem(last=False)

    def numbers(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """What `mine` is on each rank of the group.

        Every call of equal shapes asks for the same numbers in the same order, on all ranks. So
        they are exchanged in the first one, and the others go by the place in that order. (Going
        by `mine` would not do: one rank may have seen it before and another not, and then only
        the other one would wait.)

        Raises:
            SplitError: They are not what they were in the first call.
        """
        step = self._step
        self._step += 1
        row = self._schedule.get((self._path, step))
        if row is not None:
            if row[self.rank] != tuple(mine):
                raise SplitError(
                    f"exchange number {step} of this call has sizes {tuple(mine)} and had "
                    f"{row[self.rank]} in an earlier call with equal shapes: the number of tokens "
                    f"depends on values. Use batch_degree instead of ulysses_degree."
                )
            return row
        row = gather_numbers(mine, self.group, self.device)
        self._schedule[self._path, step] = row
        return row

    def forget(self) -> None:
        """Exchange the numbers anew; for when the module has changed, on all ranks."""
        self._schedules.clear()

    def note(self, part: int) -> None:
        """A part of the module runs that step caches may skip; the same on all ranks.

        What is exchanged then is looked up by the parts that have run so far in this call.
        """
        self._path = hash((self._path, part))
        self._step = 0

    def cut(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """This rank's tokens of `tensor`."""
        if cut.ndim is not None and tensor.ndim != cut.ndim:
            return tensor
        if not -tensor.ndim <= cut.dim < tensor.ndim:
            raise SplitError(f"{_name(cut)} has {tensor.ndim} dims; the plan cuts dim {cut.dim}")
        tokens = tensor.shape[cut.dim]
        if tokens < self.degree:
            raise TooFewTokensError(
                f"{_name(cut)} has {tokens} token{'s' * (tokens != 1)} along dim {cut.dim}, fewer "
                f"than ulysses_degree={self.degree}. Use ulysses_degree={max(tokens, 1)} or less, "
                f"or batch_degree."
            )
        self.cuts.add(tokens)
        start, size = part_start(tokens, self.degree, self.rank), part_sizes(tokens, self.degree)
        return tensor.narrow(cut.dim, start, size[self.rank])

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tokens of all ranks."""
        shapes = self.shapes(tensor)
        if not -tensor.ndim <= dim < tensor.ndim:
            raise SplitError(f"the plan gathers along dim {dim} of {list(tensor.shape)}")
        dim %= tensor.ndim
        others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
        if len(others) > 1:
            raise SplitError(
                f"the plan gathers along dim {dim}, but the ranks' tensors {shapes} differ in more"
            )
        return gather(tensor, dim, [shape[dim] for shape in shapes], self.group)

    def shapes(self, tensor: torch.Tensor) -> list[tuple[int, ...]]:
        """The shape of a tensor on each rank."""
        padded = [tensor.ndim, *tensor.shape, *[-1] * (MAX_DIMS - tensor.ndim)]
        return [row[1 : 1 + row[0]] for row in self.numbers(padded)]


def _name(cut: Cut) -> str:
    what = cut.argument if cut.argument is not None else f"output {cut.output}"
    if cut.element is not None:
        what = f"{what}[{cut.element}]"
    return f"{what} of {cut.path}" if cut.path else what
