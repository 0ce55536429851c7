"""A module as one row of bytes: a head that says what is where, then the tensors.

    token | length of the table | table (skeleton, entries) | tensors, each aligned

The image is never made in memory: its chunks are views of the tensors themselves.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raymod.calls import TensorMeta, bytes_of, tensor_from
from raymod.calls.packing import put_together
from raymod.weights.files import TOKEN_BYTES, new_token

__all__ = ["Image", "read_image"]

_ALIGN = 64
_TABLE_AT = TOKEN_BYTES + 8

Bytes = npt.NDArray[np.uint8]
Chunk = tuple[int, Bytes]


@dataclass(frozen=True)
class Entry:
    """One tensor in the image.

    Attributes:
        meta: Dtype and shape as stored.
        order: The dims in the order in which they are stored; None if as they are. Keeps the
            strides of channels-last and transposed tensors.
        offset: Of the first byte, from the end of the head.
    """

    meta: TensorMeta
    order: tuple[int, ...] | None
    offset: int


class Image:
    """Skeleton and tensors as a row of bytes.

    Args:
        skeleton: From `take_apart`.
        tensors: From `take_apart`; any strides, any device. Not copied, and not to be changed
            while the image is in use.
    """

    def __init__(self, skeleton: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self.token = new_token()
        self._stored: list[tuple[int, torch.Tensor]] = []
        entries = self._lay_out([_plain(tensor) for tensor in tensors])
        table = pickle.dumps((skeleton, entries), protocol=5)
        self._head = self.token + len(table).to_bytes(8, "little") + table
        self._start = _aligned(len(self._head))
        self.size = self._start + self._end

    def chunks(self, limit_bytes: int) -> Iterator[Chunk]:
        """The bytes, each chunk at most `limit_bytes` long, as `(offset, data)`.

        The head comes last: what holds the token is complete.
        """
        for offset, tensor in self._stored:
            at = self._start + offset
            for data in _bytes_in_order(tensor, limit_bytes):
                yield at, data
                at += len(data)
        head = np.frombuffer(self._head, np.uint8)
        for at in reversed(range(0, len(head), limit_bytes)):
            yield at, head[at : at + limit_bytes]

    @property
    def content_bytes(self) -> int:
        """Length of all chunks together."""
        return len(self._head) + sum(tensor.nbytes for _, tensor in self._stored)

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> list[Entry]:
        self._end = 0
        entries = []
        known: dict[tuple[torch.device, int, int], int] = {}
        for tensor in tensors:
            order = _stored_order(tensor)
            stored = tensor if order is None else tensor.permute(order)
            # Two tensors on the very same bytes are tied: they stay so, and take the room once.
            place = (stored.device, stored.data_ptr(), stored.nbytes)
            shares = stored.is_contiguous() and stored.nbytes > 0
            offset = known.get(place) if shares else None
            if offset is None:
                offset, self._end = self._end, self._end + _aligned(stored.nbytes)
                self._stored.append((offset, stored))
                if shares:
                    known[place] = offset
            entries.append(Entry(TensorMeta.of(stored), order, offset))
        return entries


def read_image(data: torch.Tensor) -> Any:
    """The object of an image; its tensors are views of `data`.

    Args:
        data: The image as a flat `uint8` tensor.
    """
    length = int.from_bytes(data[TOKEN_BYTES:_TABLE_AT].numpy().tobytes(), "little")
    end = _TABLE_AT + length
    skeleton, entries = pickle.loads(data[_TABLE_AT:end].numpy().data)
    start = _aligned(end)
    return put_together(skeleton, [_tensor(data, start, entry) for entry in entries])


def _tensor(data: torch.Tensor, start: int, entry: Entry) -> torch.Tensor:
    at = start + entry.offset
    tensor = tensor_from(data[at : at + entry.meta.nbytes], entry.meta)
    if entry.order is None:
        return tensor
    return tensor.permute(tuple(entry.order.index(dim) for dim in range(tensor.dim())))


def _stored_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dims in which `tensor` is contiguous, if only its dims are out of order."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def _bytes_in_order(tensor: torch.Tensor, limit: int) -> Iterator[Bytes]:
    """The bytes of `tensor`, at most `limit` at a time; views if it is dense and on the CPU."""
    if tensor.is_contiguous():
        flat, step = tensor.view(-1), max(1, limit // tensor.itemsize)
        for at in range(0, flat.numel(), step):
            yield bytes_of(flat[at : at + step].cpu()).numpy()
    elif tensor.nbytes <= limit:
        yield bytes_of(tensor.contiguous().cpu()).numpy()
    else:
        rows = limit // (tensor.nbytes // len(tensor))
        for part in torch.split(tensor, rows) if rows else tensor.unbind():
            yield from _bytes_in_order(part, limit)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
