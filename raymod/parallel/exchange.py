"""The collectives of a sequence split, for parts of any sizes.

Tensors travel as bytes, so that every dtype works with every backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["gather", "gather_numbers", "swap"]


def gather_numbers(
    mine: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[tuple[int, ...]]:
    """The integers of each rank, as many on each, in rank order.

    They travel on the CPU where the group can do that, which spares `device` the wait.
    """
    on_cpu = "cpu" in str(dist.get_backend_config(group))
    numbers = torch.tensor(mine, dtype=torch.int64, device="cpu" if on_cpu else device)
    every = numbers.new_empty(dist.get_world_size(group) * len(mine))
    dist.all_gather_single(every, numbers, group=group)
    return [tuple(row) for row in every.view(-1, len(mine)).tolist()]


def gather(
    tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """The parts of all ranks, one after the other along `dim`.

    Args:
        tensor: This rank's part.
        dim: The dim along which the parts differ in size.
        sizes: Size of each rank's part along it.
        group: The ranks.
    """
    dim = dim % tensor.ndim
    largest = max(sizes)
    padded = tensor
    if tensor.shape[dim] < largest:
        padded = tensor.new_empty(*tensor.shape[:dim], largest, *tensor.shape[dim + 1 :])
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    mine = _as_bytes(padded.contiguous())
    every = mine.new_empty(len(sizes) * mine.numel())
    dist.all_gather_single(every, mine, group=group)
    parts = every.view(tensor.dtype).view(len(sizes), *padded.shape)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)


def swap(
    tensors: Sequence[torch.Tensor],
    *,
    give_dim: int,
    give: Sequence[Sequence[int]],
    take_dim: int,
    take: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """Exchange one dim for another: all of `give_dim` and a part of `take_dim` for the reverse.

    All tensors travel in one collective; they have one dtype.

    Args:
        tensors: On each rank whole along `give_dim` and a part along `take_dim`.
        give_dim: The dim that is dealt out to the ranks.
        give: For each tensor, how much of it each rank gets.
        take_dim: The dim that is put together.
        take: For each tensor, how much of it each rank has.
        group: The ranks.

    Returns:
        The tensors, a part along `give_dim` and whole along `take_dim`.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    dtype = tensors[0].dtype
    chunks = [
        torch.split_with_sizes(t, list(sizes), give_dim)
        for t, sizes in zip(tensors, give, strict=True)
    ]
    sent = [sum(parts[to].numel() for parts in chunks) for to in range(ranks)]
    shapes = [
        [
            _with(_with(tensor.shape, give_dim, dealt[rank]), take_dim, held[source])
            for tensor, dealt, held in zip(tensors, give, take, strict=True)
        ]
        for source in range(ranks)
    ]
    due = [sum(shape.numel() for shape in row) for row in shapes]

    outgoing = tensors[0].new_empty(sum(sent))
    rest = outgoing
    for to in range(ranks):
        for parts in chunks:
            part = parts[to]
            rest[: part.numel()].view(part.shape).copy_(part)
            rest = rest[part.numel() :]
    incoming = tensors[0].new_empty(sum(due))
    dist.all_to_all_single(
        _as_bytes(incoming),
        _as_bytes(outgoing),
        [n * dtype.itemsize for n in due],
        [n * dtype.itemsize for n in sent],
        group=group,
    )

    received: list[list[torch.Tensor]] = [[] for _ in tensors]
    for row in shapes:
        for pieces, shape in zip(received, row, strict=True):
            pieces.append(incoming[: shape.numel()].view(shape))
            incoming = incoming[shape.numel() :]
    return [torch.cat(pieces, dim=take_dim) for pieces in received]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor's bytes."""
    return tensor.view(-1).view(torch.uint8)


def _with(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])
