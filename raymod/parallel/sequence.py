"""One rank's side of a sequence split: what is cut, and what the other ranks have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from raymod.errors import SplitError
from raymod.parallel.mesh import part_sizes, part_start
from raymod.parallel.peers import GroupPeers
from raymod.plans import Cut

__all__ = ["SequenceContext", "TooFewTokensError"]


class TooFewTokensError(SplitError):
    """A tensor has fewer tokens than there are ranks to divide them over."""


class SequenceContext(GroupPeers):
    """One rank's side of a sequence split.

    Attention processors carry it as their `_parallel_config`. Its group is the ranks that share the
    sequence.

    Attributes:
        active: Whether calls are split now.
        cuts: Numbers of tokens that were cut in this call, before the cut.
        hooks: Number of cuts and gathers placed in the module.
        attentions: Number of attention processors that carry the context.
        undo: What takes all of them off the module again.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.active = False
        self.cuts: set[int] = set()
        self.hooks = 0
        self.attentions = 0
        self.undo: list[Callable[[], None]] = []

    @contextmanager
    def on(self, key: Hashable) -> Iterator[None]:
        """Split the calls made inside.

        Args:
            key: Equal for calls of equal shapes, and the same on all ranks of the group.
        """
        self.cuts = set()
        self.active = True
        try:
            with super().on(key):
                yield
        finally:
            self.active = False

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


def _name(cut: Cut) -> str:
    what = cut.argument if cut.argument is not None else f"output {cut.output}"
    if cut.element is not None:
        what = f"{what}[{cut.element}]"
    return f"{what} of {cut.path}" if cut.path else what
