"""Tensors as raw bytes: views, never copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

__all__ = ["TensorMeta", "bytes_of", "tensor_from"]


@dataclass(frozen=True)
class TensorMeta:
    """What is needed, beside its bytes, to make a contiguous tensor again."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The description of `tensor`."""
        return _known(tensor.dtype, tuple(tensor.shape))

    @cached_property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=1024)
def _known(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorMeta:
    """One object for all that are alike: they are compared with every call."""
    return TensorMeta(dtype, shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense contiguous tensor of any dtype and rank, as a flat `uint8` view."""
    return tensor.detach().view(-1).view(torch.uint8)


def tensor_from(data: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A view of `data` as the tensor that `meta` describes; the inverse of `bytes_of`.

    Args:
        data: Flat `uint8` tensor of `meta.nbytes` bytes, aligned to the dtype's size.
        meta: Dtype and shape.
    """
    return data.view(meta.dtype).view(meta.shape)
