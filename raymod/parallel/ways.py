"""The ways a call can be run on a mesh, and running it one of them."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from raymod.calls.joining import Join
from raymod.calls.trees import map_tensors, tensors
from raymod.parallel.batch import BatchCut, Call, cut_call, size_under
from raymod.parallel.mesh import Mesh, part_sizes, part_start

__all__ = ["WHOLE", "Mechanism", "Part", "Runner", "Split", "Way"]


class Split(enum.Enum):
    """How the ranks that have the same samples share the work; the value is in words."""

    NONE = ""
    PLAN = "by sequence"  # the module's own plan
    SEARCHED = "by a searched plan"
    OPERATOR = "by operator"

    @property
    def by_sequence(self) -> bool:
        """Whether each rank has some of the tokens, so that there must be as many as ranks."""
        return self in (Split.PLAN, Split.SEARCHED)


class Mechanism(Protocol):
    """What splits a module's calls while it is on."""

    def on(self, key: Hashable) -> AbstractContextManager[None]:
        """Split the calls made inside; `key` is equal for calls of equal shapes."""

    def note(self, part: int) -> None:
        """A part of the module runs that step caches may skip; the same on all ranks."""

    def forget(self) -> None:
        """The module has changed, on all ranks."""


@dataclass(frozen=True)
class Way:
    """How a call is run.

    Attributes:
        split: How the ranks of one batch group share it.
        groups: Into how many parts the batch is divided; 1: it is not.
        cut: What of the call is divided then.
        join: How the outputs go together then; None where that was never checked.
    """

    split: Split
    groups: int
    cut: BatchCut | None = None
    join: Join | None = None

    def __str__(self) -> str:
        splits = [self.split.value, self.groups > 1 and "by batch"]
        return " and ".join(split for split in splits if split) or "whole on every rank"


WHOLE = Way(Split.NONE, groups=1)


@dataclass(frozen=True)
class Part:
    """The samples of one rank: from `start` to `stop` of a batch."""

    start: int
    stop: int
    batch: int

    @property
    def own(self) -> int:
        """Number of samples."""
        return self.stop - self.start


class Runner:
    """Runs a module's calls on one rank of a mesh.

    Attributes:
        module: The module, with its hooks in place.
        mesh: The ranks.
        mechanisms: What can split it, beside the batch.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, mechanisms: Mapping[Split, Mechanism]
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.mechanisms = mechanisms

    def run(self, call: Call, way: Way, *, seed: int, key: Hashable) -> Any:
        """This rank's output, whole or for its part of the batch; the part must not be empty.

        Args:
            call: The arguments of the whole call.
            way: How it is run.
            seed: For random numbers drawn inside, the same on all ranks.
            key: Equal for calls of one kind and size.

        Returns:
            The output, with no collective pending.
        """
        part = self.part(call, way)
        if part is not None and way.cut is not None:
            call = cut_call(call, way.cut, part.start, part.stop)
        if way.split is Split.NONE:
            return self._finished(call, seed)
        with self.mechanisms[way.split].on((key, way.groups)):
            return self._finished(call, seed)

    def part(self, call: Call, way: Way) -> Part | None:
        """This rank's part of the batch; None where the batch is not divided."""
        if way.groups == 1 or way.cut is None:
            return None
        batch = size_under(call, way.cut)
        group = self.mesh.rank // (self.mesh.world_size // way.groups)
        start = part_start(batch, way.groups, group)
        return Part(start, start + part_sizes(batch, way.groups)[group], batch)

    def replies(self, way: Way) -> bool:
        """Whether this rank is the first of those that have the same output."""
        return self.mesh.rank % (self.mesh.world_size // way.groups) == 0

    def _finished(self, call: Call, seed: int) -> Any:
        if self.mesh.world_size > 1:
            _seed(self.mesh.device, seed)  # what is drawn must not differ between ranks and runs
        output = self.module(*call[0], **call[1])
        pending = any(isinstance(tensor, AsyncCollectiveTensor) for tensor in tensors(output))
        return map_tensors(output, _waited) if pending else output


def _seed(device: torch.device, seed: int) -> None:
    """Seed the generators that a module on `device` draws from.

    `torch.manual_seed` takes a stack trace for each kind of device that this process does not use:
    a millisecond a call.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
