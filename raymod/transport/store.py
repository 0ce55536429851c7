"""Bytes through Ray's object store."""

from __future__ import annotations

import numpy as np

from raymod.calls import Packed, TensorMeta, bytes_of
from raymod.errors import CallTimeoutError
from raymod.transport.base import Bytes, Parcel, Transport, inline, private

__all__ = ["RayTransport"]


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
        if packed.nbytes <= self._inline_bytes:
            return inline(packed)
        import ray

        parcel = self.reply(packed)
        return Parcel(parcel.metas, parcel.nbytes, ray.put(parcel.payload))

    def reply(self, packed: Packed) -> Parcel:
        """See [`Transport.reply`][raymod.transport.Transport.reply]."""
        packed = packed.plain()
        parts: list[Bytes] = [np.frombuffer(packed.skeleton, np.uint8)]
        parts += [bytes_of(tensor).numpy() for tensor in packed.tensors]
        return Parcel(tuple(map(TensorMeta.of, packed.tensors)), packed.nbytes, tuple(parts))

    def receive(self, parcel: Parcel) -> Packed:
        """See [`Transport.receive`][raymod.transport.Transport.receive]."""
        skeleton, *parts = self._parts(parcel)
        tensors = zip(parcel.metas, parts, strict=True)
        # copied: memory of the object store is shared and not write-protected
        return Packed(bytes(skeleton), tuple(private(meta, part) for meta, part in tensors))

    def forget(self) -> None:
        """See [`Transport.forget`][raymod.transport.Transport.forget]."""

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
