"""What a stub asks of its ranks beside the forward; `worker.module` is a rank's module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["FETCH_BYTES", "cast", "fetch_weights", "set_attribute", "set_mode"]

FETCH_BYTES = 256 * 2**20


def fetch_weights(gang: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers of rank 0 by name, in pieces of about `FETCH_BYTES`."""
    (sizes,) = gang.call_all(_sizes_on_rank, reply_rank=0)
    values: dict[str, torch.Tensor] = {}
    for names in _batches(sizes):
        (part,) = gang.call_all(_values_on_rank, names, reply_rank=0)
        values.update(part)
    return values


def _batches(sizes: Mapping[str, int]) -> Iterable[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > FETCH_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def cast(worker: Any, dtype: torch.dtype) -> None:
    """Change the dtype of the rank's weights."""
    worker.module.to(dtype)
    worker.forget_checks()


def set_mode(worker: Any, mode: bool) -> None:
    """Set training or evaluation mode."""
    worker.module.train(mode)
    worker.forget_checks()


def set_attribute(worker: Any, name: str, value: Any) -> None:
    """Set a plain attribute of the rank's module."""
    setattr(worker.module, name, value)
    worker.forget_checks()


def _sizes_on_rank(worker: Any) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in _tensors(worker.module)}


def _values_on_rank(worker: Any, names: list[str]) -> dict[str, torch.Tensor]:
    wanted = set(names)
    return {
        name: tensor.detach().cpu() for name, tensor in _tensors(worker.module) if name in wanted
    }


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
