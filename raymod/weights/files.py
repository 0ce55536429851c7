"""A file without a name, in memory or on disk, that other processes can map.

Nothing has a name, so nothing can be left behind, whatever ends the process that made it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from raymod.errors import WeightsError
from raymod.machine import open_by_token, path_of
from raymod.weights import limits

__all__ = ["CannotOpenError", "FileTicket", "SharedFile", "map_privately"]

_MARGIN_BYTES = 512 << 20  # left to everybody else
_WRITE_BYTES = 256 << 20  # one system call writes less than 2 GiB

Bytes = npt.NDArray[np.uint8]


class CannotOpenError(WeightsError):
    """The ticket's file is not to be had in this process: another node, another container."""


@dataclass(frozen=True)
class FileTicket:
    """Where a file is, and the token at its head by which it is known.

    Attributes:
        path: `/proc/<pid>/fd/<n>`, or the file's name where there is no `/proc`.
        size: Size in bytes.
        token: The first 32 bytes.
    """

    path: str
    size: int
    token: bytes

    def opens(self) -> bool:
        """Whether this process can open the file."""
        try:
            os.close(self._open())
        except CannotOpenError:
            return False
        return True

    def map(self) -> torch.Tensor:
        """The whole file as a flat `uint8` tensor.

        Copy-on-write: pages that are only read are shared by all processes, and a write makes a
        private copy of its page.

        Raises:
            CannotOpenError: The file is not to be had here.
        """
        fd = self._open()
        try:
            return map_privately(fd, self.size)
        finally:
            os.close(fd)

    def _open(self) -> int:
        try:
            return open_by_token(self.path, size=self.size, token=self.token)
        except OSError as error:
            raise CannotOpenError(str(error)) from error


class SharedFile:
    """A file of `size` bytes: in memory if that leaves enough, else on disk.

    Args:
        size: Size in bytes.

    Raises:
        WeightsError: Neither memory nor disk has room.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_memory = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._file = self._make()
        os.ftruncate(self._file.fileno(), size)

    def write(self, offset: int, data: Bytes) -> None:
        """Write `data` at `offset`, straight from its memory.

        Raises:
            WeightsError: The room that was there is gone.
        """
        view = data.data
        while view:
            try:
                done = os.pwrite(self._file.fileno(), view[:_WRITE_BYTES], offset)
            except OSError as error:
                raise WeightsError(f"the shared copy of the weights: {error}") from error
            view, offset = view[done:], offset + done

    def seal(self) -> None:
        """Nobody can write any more, where the system can promise that."""
        if self.in_memory:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._file.fileno(), fcntl.F_ADD_SEALS, seals)

    def ticket(self, token: bytes) -> FileTicket:
        """How other processes open it.

        Args:
            token: The first bytes of the file.
        """
        path = path_of(self._file.fileno()) if self._folder is None else self._file.name
        return FileTicket(path, self.size, token)

    def close(self) -> None:
        """Let go of it; processes that have mapped it keep what they have."""
        self._file.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _make(self) -> BinaryIO:
        if not os.path.isdir("/proc/self/fd"):
            self._folder = tempfile.TemporaryDirectory(prefix="raymod-weights-")
            return open(os.path.join(self._folder.name, "weights"), "w+b", buffering=0)
        memory = limits.available_memory_bytes() - _MARGIN_BYTES
        if sys.platform == "linux" and self.size <= memory:
            with suppress(OSError):  # a system without them
                flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
                fd = os.memfd_create("raymod-weights", flags)
                self.in_memory = True
                return os.fdopen(fd, "w+b", buffering=0)
        for folder in dict.fromkeys((tempfile.gettempdir(), "/var/tmp")):
            if self.size <= limits.available_disk_bytes(folder) - _MARGIN_BYTES:
                return tempfile.TemporaryFile(dir=folder, buffering=0)
        raise WeightsError(self._no_room(memory))

    def _no_room(self, memory: int) -> str:
        folder = tempfile.gettempdir()
        disk = limits.available_disk_bytes(folder) - _MARGIN_BYTES
        return (
            f"the ranks' shared copy of the weights needs {_mib(self.size)}, but there are only "
            f"{_mib(memory)} of memory and {_mib(disk)} of disk ({folder}) to spare. Free some, "
            f"point TMPDIR to a larger disk, or let each rank load the weights itself: "
            f"weights=lambda: Cls.from_pretrained(path)."
        )


def map_privately(fd: int, size: int) -> torch.Tensor:
    """The file open at `fd` as a flat `uint8` tensor, copy-on-write."""
    return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _mib(size: int) -> str:
    return f"{max(0, size) >> 20} MiB"
