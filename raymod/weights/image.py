"""A module as one row of bytes: a head that says what is where, then the tensors.

    token | length of the table | table (skeleton, entries, files) | tensors, each aligned

The image is never made in memory: its chunks are views of the tensors themselves. Tensors that
stand in a checkpoint may stay there: then the table says in which file, and at what offset.
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
from raymod.machine import TOKEN_BYTES, new_token
from raymod.weights.checkpoint import FileRef, Stored

__all__ = ["Cast", "Content", "Image", "read_image"]

_ALIGN = 64
_TABLE_AT = TOKEN_BYTES + 8

Bytes = npt.NDArray[np.uint8]
Chunk = tuple[int, Bytes]


@dataclass(frozen=True)
class Cast:
    """A tensor of a checkpoint in another dtype than it has there; read when it is written."""

    stored: Stored
    dtype: torch.dtype

    @property
    def meta(self) -> TensorMeta:
        """Dtype and shape after the cast."""
        return TensorMeta(self.dtype, self.stored.meta.shape)

    def chunks(self, limit: int) -> Iterator[Bytes]:
        """The bytes, at most `limit` at a time."""
        meta = self.stored.meta
        step = max(1, limit // max(meta.dtype.itemsize, self.dtype.itemsize)) * meta.dtype.itemsize
        with open(self.stored.file.path, "rb", buffering=0) as file:
            file.seek(self.stored.offset)
            for at in range(0, meta.nbytes, step):
                data = bytearray(min(step, meta.nbytes - at))
                if file.readinto(data) != len(data):
                    raise OSError(f"{self.stored.file.path} has become shorter")
                values = torch.frombuffer(data, dtype=meta.dtype).to(self.dtype)
                yield bytes_of(values).numpy()


# What an image is made of: tensors that it holds, and those that it leaves in a checkpoint.
Content = torch.Tensor | Stored | Cast


@dataclass(frozen=True)
class Entry:
    """One tensor of the image.

    Attributes:
        meta: Dtype and shape as stored.
        order: The dims in the order in which they are stored; None if as they are. Keeps the
            strides of channels-last and transposed tensors.
        offset: Of the first byte: from the end of the head, or in `file`.
        file: Index of the file it is in; None: the image itself.
    """

    meta: TensorMeta
    order: tuple[int, ...] | None
    offset: int
    file: int | None = None


class Image:
    """Skeleton and tensors as a row of bytes.

    Args:
        skeleton: From `take_apart`.
        contents: For each of its tensors, in the same order, what is to be there: a tensor, of any
            strides and on any device, or one in a checkpoint. Not copied, and not to be changed
            while the image is in use.
    """

    def __init__(self, skeleton: bytes, contents: Sequence[Content]) -> None:
        self.token = new_token()
        self._held: list[tuple[int, torch.Tensor | Cast]] = []
        self._end = 0
        self._files: dict[FileRef, int] = {}
        self._known: dict[object, int] = {}
        entries = [self._entry(content) for content in contents]
        table = pickle.dumps((skeleton, entries, tuple(self._files)), protocol=5)
        self._head = self.token + len(table).to_bytes(8, "little") + table
        self._start = _aligned(len(self._head))
        self.size = self._start + self._end

    def chunks(self, limit_bytes: int) -> Iterator[Chunk]:
        """The bytes, each chunk at most `limit_bytes` long, as `(offset, data)`.

        The head comes last: what holds the token is complete.
        """
        for offset, held in self._held:
            at = self._start + offset
            for data in _bytes_in_order(held, limit_bytes):
                yield at, data
                at += len(data)
        head = np.frombuffer(self._head, np.uint8)
        for at in reversed(range(0, len(head), limit_bytes)):
            yield at, head[at : at + limit_bytes]

    @property
    def content_bytes(self) -> int:
        """Length of all chunks together."""
        return len(self._head) + sum(_nbytes(held) for _, held in self._held)

    def _entry(self, content: Content) -> Entry:
        if isinstance(content, Stored):
            index = self._files.setdefault(content.file, len(self._files))
            return Entry(content.meta, None, content.offset, index)
        if isinstance(content, Cast):
            return Entry(content.meta, None, self._room(content, content))
        tensor = _plain(content)
        order = _stored_order(tensor)
        stored = tensor if order is None else tensor.permute(order)
        # Two tensors on the very same bytes are tied: they stay so, and take the room once.
        shares = stored.is_contiguous() and stored.nbytes > 0
        place = (stored.device, stored.data_ptr(), stored.nbytes) if shares else object()
        return Entry(TensorMeta.of(stored), order, self._room(place, stored))

    def _room(self, key: object, held: torch.Tensor | Cast) -> int:
        """Where `held` is, or from now on will be."""
        if key not in self._known:
            self._known[key] = self._end
            self._held.append((self._end, held))
            self._end += _aligned(_nbytes(held))
        return self._known[key]


def read_image(data: torch.Tensor) -> Any:
    """The object of an image; its tensors are views of `data` and of the files it names.

    Args:
        data: The image as a flat `uint8` tensor.

    Raises:
        WeightsError: A file is not to be had here.
    """
    length = int.from_bytes(data[TOKEN_BYTES:_TABLE_AT].numpy().tobytes(), "little")
    end = _TABLE_AT + length
    skeleton, entries, files = pickle.loads(data[_TABLE_AT:end].numpy().data)
    own = data[_aligned(end) :]
    mapped = [file.map() for file in files]
    tensors = [_tensor(own if e.file is None else mapped[e.file], e) for e in entries]
    return put_together(skeleton, tensors)


def _tensor(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    part = data[entry.offset : entry.offset + entry.meta.nbytes]
    if part.data_ptr() % entry.meta.dtype.itemsize:  # a file that other software wrote
        part = part.clone()
    tensor = tensor_from(part, entry.meta)
    if entry.order is None:
        return tensor
    return tensor.permute(tuple(entry.order.index(dim) for dim in range(tensor.dim())))


def _nbytes(held: torch.Tensor | Cast) -> int:
    return held.meta.nbytes if isinstance(held, Cast) else held.nbytes


def _stored_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dims in which `tensor` is contiguous, if only its dims are out of order."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def _bytes_in_order(held: torch.Tensor | Cast, limit: int) -> Iterator[Bytes]:
    """The bytes, at most `limit` at a time; views if it is a dense tensor on the CPU."""
    if isinstance(held, Cast):
        yield from held.chunks(limit)
    elif held.is_contiguous():
        flat, step = held.view(-1), max(1, limit // held.itemsize)
        for at in range(0, flat.numel(), step):
            yield bytes_of(flat[at : at + step].cpu()).numpy()
    elif held.nbytes <= limit:
        yield bytes_of(held.contiguous().cpu()).numpy()
    else:
        rows = limit // (held.nbytes // len(held))
        for part in torch.split(held, rows) if rows else held.unbind():
            yield from _bytes_in_order(part, limit)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
