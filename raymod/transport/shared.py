"""Bytes through memory that the processes of one node share."""

from __future__ import annotations

import pickle
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from raymod.calls import Packed, TensorMeta, tensor_from
from raymod.transport import gpu
from raymod.transport.base import Parcel, Transport, inline, private
from raymod.transport.bulk import copy_bytes, same_bytes
from raymod.transport.segments import HEAD_BYTES, Pool, Segment, Ticket, Window
from raymod.transport.unchanged import Content

__all__ = ["SharedTransport"]

_ALIGN = 64  # a cache line, and enough for every dtype
# What is smaller is copied when it is received: a pipeline may keep it, and with it the segment.
_LEASE_BYTES = 64 << 10
# Of so many segments a receiver may hold tensors; what comes then is copied.
_MAX_LEASES = 8


@dataclass(frozen=True)
class _Placed:
    """The payload of a parcel whose bytes are in a segment.

    Attributes:
        ticket: The segment.
        skeleton: The skeleton, or its size in bytes if it is in the segment, behind the tensors.
        owner: Whose segment it is.
        keys: All segments that the owner has.
    """

    ticket: Ticket
    skeleton: bytes | int
    owner: bytes
    keys: tuple[bytes, ...]


class _PlacedParcel(Parcel):
    """A parcel in a segment. Calls are alike, so what it pickles to is mostly there already."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (_dumped(self.metas, self.nbytes, self.payload, self.reused_bytes),)


@lru_cache(maxsize=16)
def _dumped(*fields: Any) -> bytes:
    return pickle.dumps(fields, protocol=5)


@lru_cache(maxsize=16)
def _loaded(data: bytes) -> Parcel:
    return _PlacedParcel(*pickle.loads(data))


class SharedTransport(Transport):
    """Through shared memory, between processes of one user on one node.

    The sender copies each tensor once, from wherever and however it lies, into a segment. The
    receiver's tensors lie over that very memory, copy-on-write. As long as one of them is in use
    the segment is not written to again: the sender takes another one. Of a call that repeats what
    a segment holds already only the difference is written.

    Args:
        inline_bytes: Up to this size in bytes a parcel holds the data itself.
    """

    def __init__(self, *, inline_bytes: int = 16 << 10) -> None:
        self._inline_bytes = inline_bytes
        self._owner = secrets.token_bytes(8)
        self._pool = Pool()
        self._windows: dict[bytes, dict[bytes, Window]] = {}
        self._last_reply: Parcel | None = None
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[SharedTransport], tuple[()]]:
        return SharedTransport, ()  # segments stay with their process

    @property
    def segments(self) -> int:
        """Number of segments that this process has."""
        return len(self._pool)

    def send(self, packed: Packed) -> Parcel:
        """See [`Transport.send`][raymod.transport.Transport.send]."""
        return self._parcel(packed, again=True)

    def reply(self, packed: Packed) -> Parcel:
        """See [`Transport.reply`][raymod.transport.Transport.reply]."""
        parcel = self._parcel(packed, again=False)
        self._last_reply = parcel  # nobody else here holds it until it is received
        return parcel

    def receive(self, parcel: Parcel, *, device: torch.device | None = None) -> Packed:
        """See [`Transport.receive`][raymod.transport.Transport.receive]."""
        placed = parcel.payload
        if not isinstance(placed, _Placed):
            skeleton, *parts = placed
            pairs = zip(parcel.metas, parts, strict=True)
            return Packed(skeleton, tuple(private(meta, part) for meta, part in pairs))
        with self._lock:
            window = self._window(placed)
            offsets, end = _layout(parcel.metas)
            text = placed.skeleton
            if isinstance(text, int):
                where = TensorMeta(torch.uint8, (text,))
                text = window.copy(end, where).numpy().tobytes()
            if device is not None and device.type == "cuda":
                # done before the owner of the segment can hear of it, so there is nothing to lease
                parts = _parts(window.whole(), parcel.metas, offsets)
                return Packed(text, gpu.upload(parts, device))
            return Packed(text, self._tensors(window, parcel.metas, offsets))

    def settle(self) -> None:
        """Do now what the next `receive` would have to do first; for when there is time."""
        with self._lock:
            for windows in self._windows.values():
                for window in windows.values():
                    window.settle()

    def forget(self) -> None:
        """See [`Transport.forget`][raymod.transport.Transport.forget]."""
        with self._lock:
            self._last_reply = None
            self._pool.forget()

    def close(self) -> None:
        """Let go of everything, when nobody sends any more; tensors that were received stay."""
        with self._lock:
            self._last_reply = None
            self._pool.close()
            for windows in self._windows.values():
                for window in windows.values():
                    window.close()
            self._windows.clear()

    # -- within --------------------------------------------------------------------------------

    def _parcel(self, packed: Packed, *, again: bool) -> Parcel:
        with self._lock:
            # where a segment was given up, the next parcel says so to those who have it mapped
            if packed.nbytes <= self._inline_bytes and not self._pool.skip():
                return inline(packed)
            return self._place(packed, Content.of(packed.tensors, again=again))

    def _place(self, packed: Packed, content: Content) -> Parcel:
        offsets, end = _layout(content.metas)
        skeleton: bytes | int = packed.skeleton
        if len(packed.skeleton) > self._inline_bytes:
            skeleton = len(packed.skeleton)
        need = end + (skeleton if isinstance(skeleton, int) else 0)
        segment = self._pool.take(need, content)
        reused = _write(segment, content, packed.tensors, offsets)
        if isinstance(skeleton, int):
            data = np.frombuffer(packed.skeleton, np.uint8)
            segment.bytes[end : end + skeleton].numpy()[:] = data
        placed = _Placed(segment.ticket, skeleton, self._owner, self._pool.keys)
        parcel = _PlacedParcel(content.metas, packed.nbytes, placed, reused)
        segment.lend(parcel)
        return parcel

    def _window(self, placed: _Placed) -> Window:
        windows = self._windows.setdefault(placed.owner, {})
        for key in windows.keys() - set(placed.keys):
            windows.pop(key).drop()
        key = placed.ticket.key
        if key not in windows:
            windows[key] = Window(placed.ticket)
        return windows[key]

    def _tensors(
        self, window: Window, metas: Sequence[TensorMeta], offsets: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        view = None
        if any(meta.nbytes >= _LEASE_BYTES for meta in metas) and self._leases() < _MAX_LEASES:
            view = window.lease()
        if view is None:
            return tuple(map(window.copy, offsets, metas))
        tensors = []
        for offset, meta in zip(offsets, metas, strict=True):
            if meta.nbytes < _LEASE_BYTES:
                tensors.append(private(meta, view[offset : offset + meta.nbytes]))
            else:
                data = torch.frombuffer(view, dtype=torch.uint8, count=meta.nbytes, offset=offset)
                tensors.append(tensor_from(data, meta))
        return tuple(tensors)

    def _leases(self) -> int:
        return sum(w.is_leased for windows in self._windows.values() for w in windows.values())


def _parts(
    whole: torch.Tensor, metas: Sequence[TensorMeta], offsets: Sequence[int]
) -> list[torch.Tensor]:
    """The tensors that lie in `whole`, as views of it."""
    pairs = zip(metas, offsets, strict=True)
    return [tensor_from(whole[at : at + meta.nbytes], meta) for meta, at in pairs]


def _layout(metas: Sequence[TensorMeta]) -> tuple[list[int], int]:
    """Where in a segment each tensor begins, and where they end."""
    offsets = []
    end = HEAD_BYTES
    for meta in metas:
        offsets.append(end)
        end += -(-meta.nbytes // _ALIGN) * _ALIGN
    return offsets, end


def _write(
    segment: Segment, content: Content, tensors: Sequence[torch.Tensor], offsets: Sequence[int]
) -> int:
    """Make `segment` hold `tensors`; returns how many bytes of them it held already."""
    reused = 0
    before, segment.content = segment.content, None
    likely = [False] * len(tensors) if before is None else content.shares(before)
    rows = zip(tensors, content.metas, offsets, likely, strict=True)
    for tensor, meta, offset, maybe in rows:
        there = segment.bytes[offset : offset + meta.nbytes]
        # compared with what the ranks will read, so nothing else need be known of it
        if maybe and same_bytes(tensor.data_ptr(), there.data_ptr(), meta.nbytes):
            reused += meta.nbytes
        elif meta.nbytes:
            if tensor.device.type == "cuda":
                segment.pin()
            _copy(tensor, there, meta)
    gpu.finish(tensors)
    segment.content = content
    return reused


def _copy(tensor: torch.Tensor, there: torch.Tensor, meta: TensorMeta) -> None:
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    if is_plain and not (tensor.is_conj() or tensor.is_neg()):
        # torch would wake its own threads for it, which spin for a while
        copy_bytes(tensor.data_ptr(), there.data_ptr(), meta.nbytes)
        return
    with torch.no_grad():
        tensor_from(there, meta).copy_(tensor, non_blocking=True)
