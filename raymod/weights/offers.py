"""The driver's half: what the ranks are given to get the module."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt
from torch import nn

from raymod.calls import pack
from raymod.calls.packing import take_apart
from raymod.errors import ConfigError, PackError, WeightsError
from raymod.weights.checkpoint import FileRef, Stored, open_checkpoint
from raymod.weights.code import imports_of, sent_along
from raymod.weights.files import FileTicket, SharedFile
from raymod.weights.image import Content, Image
from raymod.weights.mapped import unmodified
from raymod.weights.matching import match, origin
from raymod.weights.strip import check_module, without_hooks

__all__ = [
    "PIECE_BYTES",
    "ImageOffer",
    "LoaderTicket",
    "MemoryTicket",
    "Offer",
    "Piece",
    "Source",
    "Ticket",
    "offer",
    "offer_loader",
]

PIECE_BYTES = 256 << 20
_CHUNK_BYTES = 64 << 20
_LOADER_BYTES = 64 << 20

_Self = TypeVar("_Self", bound="Offer")

Source = str | os.PathLike[str] | Callable[[], nn.Module]


@dataclass(frozen=True)
class MemoryTicket:
    """The module's bytes, ready in a file.

    Attributes:
        file: How to open it.
        content_bytes: Length of all pieces together.
        needs: Files of a checkpoint that a rank must be able to read too, or else take pieces.
    """

    file: FileTicket
    content_bytes: int
    needs: tuple[FileRef, ...] = ()


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
        imports: Names of modules that a rank will need to load; it may import them before.
        from_here: Whether the weights are those of this process.
        again: Offers the same once more, also after `close`: the module as it stands then, or what
            its source holds. None: nobody has it any more.
    """

    warnings: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    from_here: bool = False
    again: Callable[[], Offer] | None = None

    @property
    @abstractmethod
    def ticket(self) -> Ticket:
        """What `load` on a rank takes. The first use may take the time of copying the weights.

        Raises:
            WeightsError: There is no room for the ranks' copy.
        """

    @property
    def ticket_for_pieces(self) -> Ticket:
        """What a `Receiver` takes: `pieces` may bring more than the ticket's file holds."""
        return self.ticket

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


def offer(source: Source, module: nn.Module) -> Offer:
    """Offer the weights of `module` to the ranks. Quick: nothing is copied yet.

    Args:
        source: `"memory"`: the module as it stands here. `"auto"`: the same, but a weight that is
            still, byte for byte, a page of the file it was loaded from is not sent to ranks that
            can map that file. `"checkpoint"`: the checkpoint that the module was loaded from. The
            path of a checkpoint. Or a function without arguments that returns the module, to be
            run on each rank.
        module: The user's module, which is not changed.

    Raises:
        WeightsError: The module, or the function, cannot be sent, or the checkpoint does not fit.
        ConfigError: Something that is no source.
    """
    if isinstance(source, str) and source in ("auto", "memory"):
        auto = source == "auto"
        offered = ImageOffer(module, unmodified(module) if auto else None, or_pieces=auto)
        offered.from_here = True
        offered.again = functools.partial(offer, source, module)
        return offered
    if isinstance(source, (str, os.PathLike)):
        return _from_checkpoint(source, module)
    if isinstance(source, nn.Module) or not callable(source):
        raise ConfigError(
            f"weights must be 'auto', 'memory', 'checkpoint', the path of a checkpoint, or a "
            f"function without arguments that returns the module, not {type(source).__name__}"
        )
    return _LoaderOffer(source, "the function given as weights=")


def offer_loader(function: Callable[[], nn.Module]) -> Offer:
    """Offer a module that only the ranks will have.

    Args:
        function: Without arguments, returns the module; run on each rank.

    Raises:
        ConfigError: It is no function, or wants arguments.
        WeightsError: It cannot be sent.
    """
    if isinstance(function, nn.Module) or not callable(function):
        raise ConfigError(
            f"from_loader takes a function without arguments that returns the module, not "
            f"{type(function).__name__}"
        )
    return _LoaderOffer(function, "the loader")


def _from_checkpoint(source: str | os.PathLike[str], module: nn.Module) -> Offer:
    if source == "checkpoint":
        checkpoint = origin(module)
    elif isinstance(source, os.PathLike) or os.path.exists(os.path.expanduser(source)):
        checkpoint = open_checkpoint(source)
    else:
        raise ConfigError(
            f"weights={source!r} is neither 'auto', 'memory' or 'checkpoint' nor a path that "
            f"exists here. To load something else, give a function that each rank calls: "
            f"weights=lambda: {type(module).__name__}.from_pretrained({source!r})."
        )
    found = match(module, checkpoint)
    warnings: tuple[str, ...] = ()
    if found.missing:
        warnings = (
            f"{len(found.missing)} weights of the {type(module).__name__} are not in "
            f"{checkpoint.path} ({found.missing[0]}, ...): they are sent as they are here",
        )
    offered = ImageOffer(module, found.contents, warnings=warnings)
    if not found.missing:
        offered.keep()
    return offered


class ImageOffer(Offer):
    """A module that stands in this process, whole or without some of its weights.

    Args:
        module: The module.
        contents: By the `id` of a tensor of the module, what the ranks get in its place.
        or_pieces: Whether a rank that cannot read the files of `contents` gets the tensors instead.
        warnings: What the user should know.
    """

    def __init__(
        self,
        module: nn.Module,
        contents: Mapping[int, Content] | None = None,
        *,
        or_pieces: bool = False,
        warnings: tuple[str, ...] = (),
    ) -> None:
        contents = contents or {}
        bare = any(parameter.is_meta for parameter in module.parameters())
        self.warnings = check_module(module, contents) + warnings
        try:
            with sent_along(module):
                self.imports = imports_of(module)
                skeleton, tensors = take_apart(
                    module, what=type(module).__name__, reduce=without_hooks(module), meta=bare
                )
        except PackError as error:
            raise WeightsError(f"the module cannot be sent to the ranks: {error}") from error
        chosen = [contents.get(id(tensor), tensor) for tensor in tensors]
        self._image: Image | None = Image(skeleton, chosen)
        self._for_pieces: Image | None = self._image
        if or_pieces and contents:
            self._for_pieces = Image(skeleton, tensors)
        files = [content.file for content in chosen if isinstance(content, Stored)]
        self._needs = tuple(dict.fromkeys(files)) if or_pieces else ()
        self._file: SharedFile | None = None

    @property
    def ticket(self) -> MemoryTicket:
        """What `load` takes; the first use writes the copy that the ranks share."""
        image = self._open_image()
        if self._file is None:
            self._file = _written(image)
        return MemoryTicket(self._file.ticket(image.token), image.content_bytes, self._needs)

    @property
    def ticket_for_pieces(self) -> MemoryTicket:
        """What a `Receiver` takes."""
        image = self._for_pieces
        if image is None or image is self._open_image():
            return self.ticket
        # only the Receiver's own file is ever opened
        return MemoryTicket(FileTicket("", image.size, image.token), image.content_bytes)

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
        """The bytes one piece after the other."""
        chunks: list[tuple[int, npt.NDArray[np.uint8]]] = []
        size = 0
        image = self._for_pieces or self._open_image()
        for offset, data in image.chunks(min(piece_bytes, _CHUNK_BYTES)):
            if size + len(data) > piece_bytes:
                yield Piece(tuple(chunks))
                chunks, size = [], 0
            chunks.append((offset, data))
            size += len(data)
        yield Piece(tuple(chunks))

    def close(self) -> None:
        """Let go of the shared copy; ranks that have loaded keep their module."""
        if self._file is not None:
            self._file.close()
        self._file = self._image = self._for_pieces = None

    def keep(self) -> None:
        """Let `again` offer the same, which holds on to the tensors that are in no file."""
        kept = copy.copy(self)
        kept.again = self.again = lambda: copy.copy(kept)

    def _open_image(self) -> Image:
        if self._image is None:
            raise WeightsError("this offer of weights has been closed")
        return self._image


class _LoaderOffer(Offer):
    """The user's function, called on each rank."""

    def __init__(self, function: Callable[[], nn.Module], what: str) -> None:
        _check_signature(function, what)
        try:
            packed = pack(function, what="the loader")
            pickled = cloudpickle.dumps(function)
        except Exception as error:
            raise WeightsError(
                f"{what} cannot be sent to the ranks: {error}. It must pickle (cloudpickle); let "
                f"it make what it needs itself."
            ) from error
        if packed.nbytes > _LOADER_BYTES:
            raise WeightsError(
                f"{what} takes {packed.nbytes >> 20} MiB along, probably a module from outside. "
                f"Let it load the weights on the rank: lambda: Cls.from_pretrained(path)."
            )
        self._ticket = LoaderTicket(pickled)
        self.again = lambda: self

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


def _check_signature(function: Callable[[], nn.Module], what: str) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"{what} must work without arguments: {error}") from error
    except ValueError:  # a builtin that does not say
        return
