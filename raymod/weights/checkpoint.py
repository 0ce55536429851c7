"""Safetensors files: which tensors stand where, read from their headers.

No tensor is read here. What is left in its file is mapped by each rank that needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raymod.calls import TensorMeta
from raymod.errors import ConfigError, WeightsError
from raymod.weights.files import map_privately

__all__ = ["Checkpoint", "FileRef", "Stored", "open_checkpoint", "refer_to"]

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_INDEX = ".safetensors.index.json"
# what diffusers and transformers save under, where a folder holds several
_USUAL = ("diffusion_pytorch_model", "model")

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class FileRef:
    """A file that ranks map themselves, and how they know that theirs is the same.

    Attributes:
        path: Absolute path.
        size: Size in bytes.
        head_bytes: How many bytes at the beginning `digest` is of.
        digest: Their SHA-256.
        stamp: Device, inode and time of the last change, where it must be the very same file.
    """

    path: str
    size: int
    head_bytes: int
    digest: bytes
    stamp: tuple[int, int, int] | None = None

    def map(self) -> torch.Tensor:
        """The whole file as a flat `uint8` tensor, copy-on-write.

        Raises:
            WeightsError: It cannot be read here, or is another file.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise WeightsError(
                f"the checkpoint file {self.path} cannot be read here: {error.strerror}. With "
                f"weights= a path, every node must have the file under that path; else use "
                f"weights='memory'."
            ) from error
        try:
            if not self._is(fd):
                raise WeightsError(
                    f"{self.path} is another file here than on the driver ({self.size} bytes "
                    f"there, {os.fstat(fd).st_size} here, or another header). Give all nodes the "
                    f"same checkpoint."
                )
            return map_privately(fd, self.size)
        finally:
            os.close(fd)

    def opens(self) -> bool:
        """Whether this process can read it and it is the same."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            return self._is(fd)
        finally:
            os.close(fd)

    def _is(self, fd: int) -> bool:
        info = os.fstat(fd)
        if info.st_size != self.size or (self.stamp is not None and self.stamp != _stamp(info)):
            return False
        return hashlib.sha256(os.pread(fd, self.head_bytes, 0)).digest() == self.digest


@dataclass(frozen=True)
class Stored:
    """A tensor as it stands in a file.

    Attributes:
        file: The file.
        offset: Of its first byte, from the beginning of the file.
        meta: Its dtype and shape.
    """

    file: FileRef
    offset: int
    meta: TensorMeta


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint.

    Attributes:
        path: Where it is, for messages.
        tensors: Each by its name.
    """

    path: str
    tensors: Mapping[str, Stored]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        path: A `.safetensors` file, an index of several (`.safetensors.index.json`), or a folder
            that holds either.

    Raises:
        ConfigError: There is nothing of the kind.
        WeightsError: A file is damaged.
    """
    where = Path(os.path.abspath(os.path.expanduser(path)))
    source = _in_folder(where) if where.is_dir() else where
    if not source.is_file():
        raise ConfigError(
            f"{os.fspath(path)!r} is neither a folder with safetensors nor such a file. A model "
            f"that is not on this machine must be downloaded first."
        )
    if source.name.endswith(_INDEX):
        return Checkpoint(str(where), _sharded(source))
    return Checkpoint(str(where), _header(source))


def refer_to(path: str, *, stamped: bool, head_bytes: int = 1 << 16) -> FileRef:
    """A reference to a file as it is now.

    Args:
        path: Absolute path.
        stamped: Whether it must be the very same file, not one like it.
        head_bytes: How much of its beginning is compared.

    Raises:
        OSError: It cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        head = os.pread(fd, min(head_bytes, info.st_size), 0)
    finally:
        os.close(fd)
    stamp = _stamp(info) if stamped else None
    return FileRef(path, info.st_size, len(head), hashlib.sha256(head).digest(), stamp)


def _stamp(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_dev, info.st_ino, info.st_mtime_ns


def _in_folder(folder: Path) -> Path:
    """The one file in `folder` that stands for its checkpoint."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    indices = [name for name in names if name.endswith(_INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    for stem in _USUAL:
        for name in (f"{stem}{_INDEX}", f"{stem}.safetensors"):
            if name in indices or name in files:
                return folder / name
    found = indices or files
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise ConfigError(
            f"{folder} holds several checkpoints: {', '.join(found[:4])}. Give the path of one."
        )
    subfolders = sorted({path.parent.name for path in folder.glob("*/*.safetensors")})
    inside = f" Its subfolders do: {', '.join(subfolders)}." if subfolders else ""
    raise ConfigError(f"{folder} holds no safetensors file.{inside}")


def _sharded(index: Path) -> dict[str, Stored]:
    try:
        files: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        shards = {name: _header(index.parent / name) for name in sorted(set(files.values()))}
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
        raise WeightsError(f"{index} is not the index of a complete checkpoint: {error}") from error
    missing = [name for name, file in files.items() if name not in shards[file]]
    if missing:
        raise WeightsError(f"{index} says that {files[missing[0]]} holds {missing[0]}: it does not")
    return {name: shards[file][name] for name, file in files.items()}


def _header(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds.

    It begins with the length of the header (8 bytes, little endian), then the header as JSON, and
    the offsets in it count from its end.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise WeightsError(
                f"{path} is no safetensors file ({size} bytes). If it came by git, its content may "
                f"not have been fetched (git lfs pull)."
            )
        text = file.read(length)
    start = 8 + length
    ref = refer_to(str(path), stamped=False, head_bytes=start)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        return {name: _stored(ref, start, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: its safetensors header is damaged: {error}") from error


def _stored(file: FileRef, start: int, entry: Mapping[str, Any]) -> Stored:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"the dtype {entry['dtype']} is not known")
    meta = TensorMeta(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
    first, end = entry["data_offsets"]
    if end - first != meta.nbytes or not 0 <= first <= end <= file.size - start:
        raise ValueError(f"a tensor of {meta.nbytes} bytes is said to stand at {first} to {end}")
    return Stored(file, start + first, meta)
