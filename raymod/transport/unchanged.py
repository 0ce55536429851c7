"""Whether a tensor holds what was sent before.

Only a comparison of all bytes is certain: identity and version counter miss writes through `.data`,
`.numpy()` or a view of another library, and pipelines make new tensors with equal content at every
step. It costs no more than a copy would; a few sampled bytes tell first whether it is worth while.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raymod.calls import TensorMeta

__all__ = ["Content"]

_WORTH_BYTES = 4096
_SAMPLE_BYTES = 64


@dataclass(frozen=True, eq=False)
class Content:
    """What was sent once, as far as it can be told at a glance.

    Attributes:
        metas: Dtype and shape of each tensor.
        samples: Some bytes of each tensor; empty where a comparison is not worth while.
    """

    metas: tuple[TensorMeta, ...]
    samples: tuple[bytes, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, again: bool = True) -> Content:
        """The content of `tensors`, of any strides and devices.

        Args:
            tensors: The tensors.
            again: Whether it may come again; else it is never the same as another.
        """
        samples = tuple(map(_sample, tensors)) if again else (b"",) * len(tensors)
        return cls(tuple(map(TensorMeta.of, tensors)), samples)

    def shares(self, other: Content) -> list[bool]:
        """For each tensor of this one, whether `other` may well hold the same in its place."""
        if self.metas != other.metas:
            return [False] * len(self.metas)
        pairs = zip(self.samples, other.samples, strict=True)
        return [bool(mine) and mine == its for mine, its in pairs]

    def shared_bytes(self, other: Content | None) -> int:
        """Size in bytes of what `other` may well hold too."""
        if other is None or not any(self.samples):
            return 0
        pairs = zip(self.metas, self.shares(other), strict=True)
        return sum(meta.nbytes for meta, shared in pairs if shared)


def _sample(tensor: torch.Tensor) -> bytes:
    if (
        tensor.nbytes < _WORTH_BYTES
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_conj()  # such a view shows other numbers than its memory holds
        or tensor.is_neg()
    ):
        return b""
    start, last = tensor.data_ptr(), tensor.nbytes - _SAMPLE_BYTES
    return b"".join(ctypes.string_at(start + at, _SAMPLE_BYTES) for at in (0, last // 2, last))
