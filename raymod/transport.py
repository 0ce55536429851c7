"""How the bytes of a call reach the ranks and come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raymod.calls import Packed, TensorMeta, bytes_of
from raymod.errors import CallTimeoutError

__all__ = ["Parcel", "RayTransport", "Transport"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Parcel:
    """A packed object on its way: small, picklable, and all that a receiver needs.

    Attributes:
        metas: Dtype and shape of its tensors.
        nbytes: Size of skeleton and tensors in bytes.
        payload: Where the bytes are; known to the transport that made the parcel.
    """

    metas: tuple[TensorMeta, ...]
    nbytes: int
    payload: Any


class Transport(ABC):
    """Moves packed objects between the driver and the ranks.

    The contract, which one conformance suite checks for every implementation:

    - A parcel from `send` can be received by any process of the gang, on any node, any number of
      times and at once, until the sender drops it: then nothing of it is left behind.
    - A parcel from `reply` is for the one process that waits for it; it is what a rank returns.
    - `receive` gives private, writable tensors: nobody else sees a write to them, and they outlive
      the parcel.
    - The sender may change its tensors as soon as `send` has returned; after `reply`, once the
      parcel has been pickled.
    - Parcels pickle. Every wait has a limit.
    """

    @abstractmethod
    def send(self, packed: Packed) -> Parcel:
        """Make `packed` available to all ranks; its bytes are stored once, not once a rank."""

    @abstractmethod
    def reply(self, packed: Packed) -> Parcel:
        """Make a parcel for the process that is waiting for this one's answer."""

    @abstractmethod
    def receive(self, parcel: Parcel) -> Packed:
        """The packed object again.

        Raises:
            CallTimeoutError: The bytes did not arrive within the limit.
        """


class RayTransport(Transport):
    """Through Ray's object store: works on every cluster, across nodes.

    Skeleton and tensors are put once, as raw bytes straight from the tensors' memory; what is
    small travels inside the parcel instead. A reply is always inside its parcel, whose arrays Ray
    moves out of band. Dropping the parcel frees the object: Ray counts the references.

    Args:
        inline_bytes: Up to this size in bytes a parcel holds the data itself.
        timeout_s: Limit for fetching the bytes of one parcel, in seconds.
    """

    def __init__(self, *, inline_bytes: int = 64 << 10, timeout_s: float = 600.0) -> None:
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s

    def send(self, packed: Packed) -> Parcel:
        """See [`Transport.send`][raymod.transport.Transport.send]."""
        parcel = self.reply(packed)
        if parcel.nbytes <= self._inline_bytes:
            # Copied, as the sender may change its tensors; ranks would get read-only views.
            payload: Any = tuple(part.tobytes() for part in parcel.payload)
        else:
            import ray

            payload = ray.put(parcel.payload)
        return Parcel(parcel.metas, parcel.nbytes, payload)

    def reply(self, packed: Packed) -> Parcel:
        """See [`Transport.reply`][raymod.transport.Transport.reply]."""
        parts: list[Bytes] = [np.frombuffer(packed.skeleton, np.uint8)]
        parts += [bytes_of(tensor).numpy() for tensor in packed.tensors]
        return Parcel(tuple(map(TensorMeta.of, packed.tensors)), packed.nbytes, tuple(parts))

    def receive(self, parcel: Parcel) -> Packed:
        """See [`Transport.receive`][raymod.transport.Transport.receive]."""
        skeleton, *parts = self._parts(parcel)
        tensors = zip(parcel.metas, parts, strict=True)
        return Packed(bytes(skeleton), tuple(_private(meta, part) for meta, part in tensors))

    def _parts(self, parcel: Parcel) -> tuple[Bytes | bytes, ...]:
        payload = parcel.payload
        if not isinstance(payload, tuple):
            import ray

            try:
                payload = ray.get(payload, timeout=self._timeout_s)
            except ray.exceptions.GetTimeoutError as error:
                raise CallTimeoutError(
                    f"{parcel.nbytes} bytes did not arrive through Ray's object store within "
                    f"{self._timeout_s} s"
                ) from error
        return payload  # type: ignore[no-any-return]


def _private(meta: TensorMeta, data: Bytes | bytes) -> torch.Tensor:
    """A tensor of its own: memory of the object store is shared and not write-protected."""
    tensor = torch.empty(meta.shape, dtype=meta.dtype)
    bytes_of(tensor).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor
