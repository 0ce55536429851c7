"""The device mesh: where each rank stands, and what all ranks agree on."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from raymod.config import Degrees
from raymod.errors import ConfigError

__all__ = ["AXES", "Mesh", "part_sizes", "part_start"]

# From the outside in. Neighbours along the last axis have neighbouring ranks, and so sit on one
# node: that place is for the axis that talks most.
AXES = ("batch", "ring", "ulysses")


def part_sizes(total: int, parts: int) -> list[int]:
    """Sizes of the parts that `torch.tensor_split` makes: the first ones are larger by one."""
    small, larger = divmod(total, parts)
    return [small + (part < larger) for part in range(parts)]


def part_start(total: int, parts: int, part: int) -> int:
    """Where part number `part` begins."""
    small, larger = divmod(total, parts)
    return part * small + min(part, larger)


class Mesh:
    """One rank's place among the others.

    Attributes:
        degrees: How many ways along each axis.
        rank: This rank.
        world_size: Number of ranks.
        device: Where this rank computes.
        batch_rank: Which batch group it belongs to.
        sequence_rank: Which part of the sequence it has.
        sequence_group: The ranks that share a sequence; None where there is only this one.
        groups: The ranks along each axis that has more than one.
    """

    def __init__(self, degrees: Degrees, device: torch.device) -> None:
        """Build it; every rank must do so at the same time.

        Raises:
            ConfigError: torch.distributed was not started with as many ranks as `degrees` say.
        """
        self.degrees = degrees
        self.device = device
        self.rank = 0
        self.world_size = degrees.world_size
        self.batch_rank = 0
        self.sequence_rank = 0
        self.sequence_group: dist.ProcessGroup | None = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._control: dist.ProcessGroup | None = None
        if self.world_size > 1:
            self._join()

    def _join(self) -> None:
        there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if there != self.world_size:
            raise ConfigError(
                f"{self.degrees} makes {self.world_size} ranks, but torch.distributed runs with "
                f"{there}"
            )
        self.rank = dist.get_rank()
        used = {axis: self.degrees.of(axis) for axis in AXES if self.degrees.of(axis) > 1}
        mesh = init_device_mesh(self.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        self.groups = {axis: mesh.get_group(axis) for axis in used}
        self.batch_rank = mesh.get_local_rank("batch") if "batch" in used else 0
        sequence = tuple(axis for axis in ("ring", "ulysses") if axis in used)
        if len(sequence) == 1:
            self.sequence_group = self.groups[sequence[0]]
        elif sequence:
            self.sequence_group = mesh[sequence]._flatten("sequence").get_group()
        if self.sequence_group is not None:
            self.sequence_rank = dist.get_rank(self.sequence_group)
        # A group of its own: a rank that gave up must not answer another's collective.
        self._control = dist.new_group(backend="gloo")

    def worst(self, values: list[float], *, limit_s: float) -> list[float]:
        """The largest of each of `values` over all ranks.

        Args:
            values: As many on each rank.
            limit_s: How long to wait for the other ranks, in seconds.

        Raises:
            TimeoutError: They did not come; one of them is likely to wait for something else.
        """
        if self._control is None:
            return values
        mine = torch.tensor(values, dtype=torch.float64)
        self._done(
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._control, async_op=True),
            limit_s,
        )
        result: list[float] = mine.tolist()
        return result

    def total(self, values: list[float], *, limit_s: float) -> list[float]:
        """The sum of each of `values` over all ranks, the same to the last bit on each.

        Args:
            values: As many on each rank.
            limit_s: How long to wait for the other ranks, in seconds.

        Raises:
            TimeoutError: They did not come.
        """
        if self._control is None:
            return values
        mine = torch.tensor(values, dtype=torch.float64)
        every = torch.empty(self.world_size * len(values), dtype=torch.float64)
        self._all_gather(every, mine, limit_s)
        result: list[float] = every.view(self.world_size, len(values)).sum(0).tolist()
        return result

    def said(self, mine: Any, *, limit_s: float) -> list[Any]:
        """What each rank says, in rank order; picklable.

        Args:
            mine: What this rank says.
            limit_s: How long to wait for the other ranks, in seconds.

        Raises:
            TimeoutError: They did not come.
        """
        if self._control is None:
            return [mine]
        data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64)
        self._all_gather(sizes, torch.tensor([len(data)]), limit_s)
        largest = int(sizes.max())
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(data)] = data
        every = torch.empty(self.world_size * largest, dtype=torch.uint8)
        self._all_gather(every, padded, limit_s)
        rows = zip(every.view(self.world_size, largest), sizes.tolist(), strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in rows]

    def _all_gather(self, every: torch.Tensor, mine: torch.Tensor, limit_s: float) -> None:
        work = dist.all_gather_single(every, mine, group=self._control, async_op=True)
        self._done(work, limit_s)

    def _done(self, work: Any, limit_s: float) -> None:
        try:
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise TimeoutError(
                f"rank {self.rank} waited {limit_s:.0f} s for the other ranks to decide with them"
            ) from error
