"""What a transport is: its contract, and what travels by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raymod.calls import Packed, TensorMeta, bytes_of
from raymod.transport.bulk import copy_bytes

__all__ = ["Bytes", "Parcel", "Transport", "inline", "private"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Parcel:
    """A packed object on its way: small, picklable, and all that a receiver needs.

    Attributes:
        metas: Dtype and shape of its tensors.
        nbytes: Size of skeleton and tensors in bytes.
        payload: Where the bytes are; known to the transport that made the parcel.
        reused_bytes: How many of its bytes were there already, from an earlier parcel.
    """

    metas: tuple[TensorMeta, ...]
    nbytes: int
    payload: Any
    reused_bytes: int = 0


class Transport(ABC):
    """Moves packed objects between the driver and the ranks.

    The contract, which one conformance suite checks for every implementation:

    - A parcel from `send` can be received by any process of the gang that the transport reaches,
      any number of times and at once, until the sender drops it. What is kept of it then, so that
      a later parcel need not carry the same bytes again, is bounded, and gone after `forget`.
    - A parcel from `reply` is for the one process that waits for it; it is what a rank returns. It
      can be received until the second `reply` after it.
    - `receive` gives private, writable tensors: nobody else sees a write to them, and they outlive
      the parcel.
    - The sender may change its tensors as soon as `send` has returned; after `reply`, once the
      parcel has been pickled.
    - What is received is bit for bit what the sender's tensors held when it sent, whatever was
      sent before.
    - Parcels pickle. Every wait has a limit.
    """

    @abstractmethod
    def send(self, packed: Packed) -> Parcel:
        """Make `packed` available to all ranks; its bytes are stored once, not once a rank."""

    @abstractmethod
    def reply(self, packed: Packed) -> Parcel:
        """Make a parcel for the process that is waiting for this one's answer."""

    @abstractmethod
    def receive(self, parcel: Parcel, *, device: torch.device | None = None) -> Packed:
        """The packed object again.

        Args:
            parcel: What `send` or `reply` returned, here or elsewhere.
            device: Where its tensors are wanted, if a transport knows a short way there; they may
                be on the CPU nevertheless.

        Raises:
            CallTimeoutError: The bytes did not arrive within the limit.
            GangError: They are not to be had.
        """

    @abstractmethod
    def forget(self) -> None:
        """Let go of what is kept of parcels that were dropped."""


def inline(packed: Packed) -> Parcel:
    """A parcel that holds the data itself, for what is small."""
    packed = packed.plain()
    parts = (packed.skeleton, *(bytes_of(t).numpy().tobytes() for t in packed.tensors))
    return Parcel(tuple(map(TensorMeta.of, packed.tensors)), packed.nbytes, parts)


def private(meta: TensorMeta, data: Bytes | bytes | memoryview) -> torch.Tensor:
    """A tensor of its own with a copy of `data`."""
    tensor = torch.empty(meta.shape, dtype=meta.dtype)
    if meta.nbytes:
        copy_bytes(np.frombuffer(data, np.uint8).ctypes.data, tensor.data_ptr(), meta.nbytes)
    return tensor
