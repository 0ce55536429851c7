"""The driver's half: what the ranks are given to get the module."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt
from torch import nn

from raymod.calls import pack
from raymod.calls.packing import take_apart
from raymod.errors import ConfigError, PackError, UnsupportedError, WeightsError
from raymod.weights.files import FileTicket, SharedFile
from raymod.weights.image import Image
from raymod.weights.strip import check_module, without_hooks

__all__ = ["PIECE_BYTES", "LoaderTicket", "MemoryTicket", "Offer", "Piece", "Ticket", "offer"]

PIECE_BYTES = 256 << 20
_CHUNK_BYTES = 64 << 20
_LOADER_BYTES = 64 << 20

_Self = TypeVar("_Self", bound="Offer")


@dataclass(frozen=True)
class MemoryTicket:
    """The module's bytes, ready in a file.

    Attributes:
        file: How to open it.
        content_bytes: Length of all pieces together.
    """

    file: FileTicket
    content_bytes: int


@dataclass(frozen=True)
class LoaderTicket:
    """A function to call on the rank, pickled."""

    function: bytes


Ticket = MemoryTicket | LoaderTicket


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the module's bytes, for ranks that cannot open the file.

    Attributes:
        chunks: `(offset, data)`, the data flat `uint8` arrays that may be views of the weights.
    """

    chunks: tuple[tuple[int, npt.NDArray[np.uint8]], ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return sum(data.nbytes for _, data in self.chunks)


class Offer(ABC):
    """Weights on offer to the ranks, until closed. A context manager.

    Attributes:
        warnings: What the user should know about the copy on the ranks.
    """

    warnings: tuple[str, ...] = ()

    @property
    @abstractmethod
    def ticket(self) -> Ticket:
        """What `load` on a rank takes. The first use may take the time of copying the weights.

        Raises:
            WeightsError: There is no room for the ranks' copy.
        """

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
        """The bytes one piece after the other, for a `Receiver` on each node that needs them.

        Hold one piece at a time: together they are as large as the model.

        Args:
            piece_bytes: Largest size of a piece in bytes.
        """
        return iter(())

    def close(self) -> None:  # noqa: B027 - most offers hold nothing
        """Let go of what is shared; ranks that have loaded keep their module."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def offer(source: str | Callable[[], nn.Module], module: nn.Module) -> Offer:
    """Offer the weights of `module` to the ranks. Quick: nothing is copied yet.

    Args:
        source: `"auto"` or `"memory"`: the module as it stands here. A function without arguments
            that returns the module: it runs on each rank.
        module: The user's module, which is not changed.

    Raises:
        WeightsError: The module, or the function, cannot be sent.
        UnsupportedError: A source that this version does not have.
        ConfigError: Something that is no source.
    """
    if isinstance(source, str) and source in ("auto", "memory"):
        return _MemoryOffer(module)
    if isinstance(source, (str, os.PathLike)):
        raise UnsupportedError(
            f"weights={source!r}: this version does not read checkpoints by path. Give a function "
            f"that each rank calls instead: weights=lambda: {type(module).__name__}"
            f".from_pretrained({os.fspath(source)!r})."
        )
    if isinstance(source, nn.Module) or not callable(source):
        raise ConfigError(
            f"weights must be 'auto', 'memory', or a function without arguments that returns the "
            f"module, not {type(source).__name__}"
        )
    return _LoaderOffer(source)


class _MemoryOffer(Offer):
    """The module as it stands in this process."""

    def __init__(self, module: nn.Module) -> None:
        self.warnings = check_module(module)
        try:
            skeleton, tensors = take_apart(
                module, what=type(module).__name__, reduce=without_hooks(module)
            )
        except PackError as error:
            raise WeightsError(f"the module cannot be sent to the ranks: {error}") from error
        self._image: Image | None = Image(skeleton, tensors)
        self._file: SharedFile | None = None

    @property
    def ticket(self) -> MemoryTicket:
        image = self._open_image()
        if self._file is None:
            self._file = _written(image)
        return MemoryTicket(self._file.ticket(image.token), image.content_bytes)

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
        chunks: list[tuple[int, npt.NDArray[np.uint8]]] = []
        size = 0
        for offset, data in self._open_image().chunks(min(piece_bytes, _CHUNK_BYTES)):
            if size + len(data) > piece_bytes:
                yield Piece(tuple(chunks))
                chunks, size = [], 0
            chunks.append((offset, data))
            size += len(data)
        yield Piece(tuple(chunks))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._image = None

    def _open_image(self) -> Image:
        if self._image is None:
            raise WeightsError("this offer of weights has been closed")
        return self._image


class _LoaderOffer(Offer):
    """The user's function, called on each rank."""

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        _check_signature(function)
        try:
            packed = pack(function, what="the loader")
            pickled = cloudpickle.dumps(function)
        except Exception as error:
            raise WeightsError(
                f"the function given as weights= cannot be sent to the ranks: {error}. It must "
                f"pickle (cloudpickle); let it make what it needs itself."
            ) from error
        if packed.nbytes > _LOADER_BYTES:
            raise WeightsError(
                f"the function given as weights= takes {packed.nbytes >> 20} MiB along, probably "
                f"a module from outside. Let it load the weights on the rank: "
                f"weights=lambda: Cls.from_pretrained(path)."
            )
        self._ticket = LoaderTicket(pickled)

    @property
    def ticket(self) -> LoaderTicket:
        return self._ticket


def _written(image: Image) -> SharedFile:
    file = SharedFile(image.size)
    try:
        for offset, data in image.chunks(_CHUNK_BYTES):
            file.write(offset, data)
        file.seal()
    except BaseException:
        file.close()
        raise
    return file


def _check_signature(function: Callable[[], nn.Module]) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"the function given as weights= must work without arguments: {error}"
        ) from error
    except ValueError:  # a builtin that does not say
        return
