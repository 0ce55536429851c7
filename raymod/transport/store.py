"""Bytes through Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raymod.calls import Packed, TensorMeta, bytes_of
from raymod.errors import CallTimeoutError
from raymod.transport.base import Bytes, Parcel, Transport, inline, private
from raymod.transport.bulk import same_bytes
from raymod.transport.unchanged import Content

__all__ = ["RayTransport"]

# So many puts, and bytes in them, are kept for content that comes again and again.
_KEEP = 4
_KEEP_BYTES = 128 << 20
# What so many parcels did not refer to is no longer kept.
_IDLE = 16


@dataclass(frozen=True)
class _Stored:
    """The payload of a parcel whose bytes are in the object store, or some of them.

    Attributes:
        fresh: What is new, in the parcel itself or in the store: the skeleton and some tensors.
        kept: What earlier parcels have put there.
        places: Where each tensor is: index into `kept`, or -1 for `fresh`; index in there.
    """

    fresh: Any
    kept: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]


@dataclass(eq=False)
class _Put:
    """What one parcel put into the store, and what of it is known here.

    Attributes:
        ref: Ray's reference.
        nbytes: Size in bytes.
        where: Of each tensor, by its index in the call: dtype and shape, some bytes, index in it.
        used_at: The parcel that used it last.
    """

    ref: Any
    nbytes: int
    where: dict[int, tuple[TensorMeta, bytes, int]]
    used_at: int
    _parts: Sequence[Bytes] = field(default=())

    def find(self, index: int, tensor: torch.Tensor, meta: TensorMeta, sample: bytes) -> int:
        """Where in it `tensor` is; -1 if it is not."""
        known = self.where.get(index)
        if not sample or known is None or known[:2] != (meta, sample):
            return -1
        if not self._parts:
            import ray

            self._parts = ray.get(self.ref)  # a view of the store's memory, which nobody writes to
        part = self._parts[known[2]]
        return known[2] if same_bytes(tensor.data_ptr(), part.ctypes.data, meta.nbytes) else -1


class RayTransport(Transport):
    """Through Ray's object store: works on every cluster, across nodes.

    Skeleton and tensors are put once, as raw bytes straight from the tensors' memory; what is
    small travels inside the parcel instead. What an earlier parcel has put there already is
    referred to. A reply is always inside its parcel, whose arrays Ray moves out of band. Dropping
    the parcel frees the object, once it is not kept either: Ray counts the references.

    Args:
        inline_bytes: Up to this size in bytes a parcel holds the data itself.
        timeout_s: Limit for fetching the bytes of one parcel, in seconds.
    """

    def __init__(self, *, inline_bytes: int = 64 << 10, timeout_s: float = 600.0) -> None:
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s
        self._kept: list[_Put] = []
        self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": [], "_count": 0}  # references stay with the driver

    def send(self, packed: Packed) -> Parcel:
        """See [`Transport.send`][raymod.transport.Transport.send]."""
        self._count += 1
        if packed.nbytes <= self._inline_bytes:
            self._trim()
            return inline(packed)
        packed = packed.plain()
        content = Content.of(packed.tensors)
        found = [self._find(index, tensor, content) for index, tensor in enumerate(packed.tensors)]
        new = [index for index, place in enumerate(found) if place is None]
        fresh = self._put(packed, content, new)
        used = list(dict.fromkeys(put for put, _ in filter(None, found)))
        places = [
            (-1, new.index(n) + 1) if p is None else (used.index(p[0]), p[1])
            for n, p in enumerate(found)
        ]
        reused = sum(content.metas[n].nbytes for n, p in enumerate(found) if p is not None)
        stored = _Stored(fresh, tuple(put.ref for put in used), tuple(places))
        self._trim()
        return Parcel(content.metas, packed.nbytes, stored, reused)

    def reply(self, packed: Packed) -> Parcel:
        """See [`Transport.reply`][raymod.transport.Transport.reply]."""
        packed = packed.plain()
        parts: list[Bytes] = [np.frombuffer(packed.skeleton, np.uint8)]
        parts += [bytes_of(tensor).numpy() for tensor in packed.tensors]
        return Parcel(tuple(map(TensorMeta.of, packed.tensors)), packed.nbytes, tuple(parts))

    def receive(self, parcel: Parcel, *, device: torch.device | None = None) -> Packed:
        """See [`Transport.receive`][raymod.transport.Transport.receive]."""
        skeleton, *parts = self._parts(parcel)
        tensors = zip(parcel.metas, parts, strict=True)
        # copied: memory of the object store is shared and not write-protected
        return Packed(bytes(skeleton), tuple(private(meta, part) for meta, part in tensors))

    def forget(self) -> None:
        """See [`Transport.forget`][raymod.transport.Transport.forget]."""
        self._kept.clear()

    # -- within --------------------------------------------------------------------------------

    def _find(self, index: int, tensor: torch.Tensor, content: Content) -> tuple[_Put, int] | None:
        for put in self._kept:
            part = put.find(index, tensor, content.metas[index], content.samples[index])
            if part >= 0:
                put.used_at = self._count
                return put, part
        return None

    def _put(self, packed: Packed, content: Content, new: Sequence[int]) -> Any:
        """Skeleton and new tensors: in the store, or as they are if they are small."""
        parts = [np.frombuffer(packed.skeleton, np.uint8)]
        parts += [bytes_of(packed.tensors[index]).numpy() for index in new]
        nbytes = sum(part.nbytes for part in parts)
        if nbytes <= self._inline_bytes:
            return tuple(part.tobytes() for part in parts)
        import ray

        ref = ray.put(tuple(parts))
        where = {
            index: (content.metas[index], content.samples[index], place)
            for place, index in enumerate(new, start=1)
        }
        self._kept.append(_Put(ref, nbytes, where, self._count))
        return ref

    def _trim(self) -> None:
        """Keep what was used last, within bounds."""
        self._kept = [put for put in self._kept if self._count - put.used_at < _IDLE]
        self._kept.sort(key=lambda put: -put.used_at)
        del self._kept[_KEEP:]
        while sum(put.nbytes for put in self._kept) > _KEEP_BYTES:
            self._kept.pop()

    def _parts(self, parcel: Parcel) -> Sequence[Bytes | bytes]:
        payload = parcel.payload
        if not isinstance(payload, _Stored):
            return payload  # type: ignore[no-any-return]
        is_inline = isinstance(payload.fresh, tuple)
        refs = [*payload.kept, *(() if is_inline else (payload.fresh,))]
        objects = self._fetched(refs, parcel.nbytes)
        fresh = payload.fresh if is_inline else objects[-1]
        places = payload.places
        return [fresh[0], *((fresh if i < 0 else objects[i])[part] for i, part in places)]

    def _fetched(self, refs: list[Any], nbytes: int) -> list[Any]:
        import ray

        try:
            found: list[Any] = ray.get(refs, timeout=self._timeout_s)
            return found
        except ray.exceptions.GetTimeoutError as error:
            raise CallTimeoutError(
                f"{nbytes} bytes did not arrive through Ray's object store within "
                f"{self._timeout_s} s"
            ) from error
