"""One rank's side of a sequence split: what is cut, and what the other ranks have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from raymod.config import Degrees
from raymod.errors import SplitError
from raymod.parallel.mesh import Mesh, part_sizes, part_start
from raymod.parallel.peers import GroupPeers
from raymod.plans import Cut

__all__ = ["SequenceContext", "TooFewTokensError"]


class TooFewTokensError(SplitError):
    """A tensor has fewer tokens than there are ranks to divide them over."""


class SequenceContext(GroupPeers):
    """One rank's side of a sequence split.

    Attention processors carry it as their `_parallel_config`. Its group is the ranks that share the
    sequence: the parts of a ring, each of them one rank or several that exchange tokens for heads.

    Attributes:
        ulysses_group: The ranks that exchange tokens for heads.
        ulysses_degree: Their number.
        ulysses_rank: This rank's place among them.
        ring_group: The ranks that pass keys and values round.
        ring_degree: Their number; 1 where nothing is passed round.
        active: Whether calls are split now.
        cuts: Numbers of tokens that were cut in this call, before the cut.
        hooks: Number of cuts and gathers placed in the module.
        attentions: Number of attention processors that carry the context.
        undo: What takes all of them off the module again.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        ring_degree: int = 1,
        ulysses_group: dist.ProcessGroup | None = None,
        ring_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Set it up.

        Args:
            group: The ranks that share the sequence, those that exchange tokens for heads side by
                side.
            device: Where this rank computes.
            ring_degree: Number of parts of the ring.
            ulysses_group: The ranks that exchange tokens for heads. None: all.
            ring_group: The ranks that pass keys and values round. None: all.
        """
        super().__init__(group, device)
        self.ring_degree = ring_degree
        self.ring_group = ring_group or group
        self.ulysses_degree = self.degree // ring_degree
        self.ulysses_rank = self.rank % self.ulysses_degree
        self.ulysses_group = ulysses_group or group
        self.active = False
        self.cuts: set[int] = set()
        self.hooks = 0
        self.attentions = 0
        self.undo: list[Callable[[], None]] = []

    @classmethod
    def of(cls, mesh: Mesh) -> SequenceContext:
        """Of a mesh that has more than one rank to a sequence."""
        assert mesh.sequence_group is not None
        return cls(
            mesh.sequence_group,
            mesh.device,
            ring_degree=mesh.degrees.ring_degree,
            ulysses_group=mesh.groups.get("ulysses"),
            ring_group=mesh.groups.get("ring"),
        )

    @property
    def neighbours(self) -> slice:
        """The ranks that exchange tokens for heads with this one, by their places in the group."""
        first = self.rank - self.ulysses_rank
        return slice(first, first + self.ulysses_degree)

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
            degrees = Degrees(ring_degree=self.ring_degree, ulysses_degree=self.ulysses_degree)
            raise TooFewTokensError(
                f"{_name(cut)} has {tokens} token{'s' * (tokens != 1)} along dim {cut.dim}, fewer "
                f"than the {self.degree} ranks of {degrees}. Use {max(tokens, 1)} of them or less, "
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
