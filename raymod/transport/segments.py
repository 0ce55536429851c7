"""Pieces of shared memory: a process writes its own, and reads those of others.

A segment is a file in memory without a name, so nothing can be left behind, whatever ends its
owner. Another process of the same user and machine opens it through `/proc/<pid>/fd/<n>` and knows
it by a token at its head. A reader's lock on it says that tensors over its memory are still in use
there; the system takes the lock away with the process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from raymod.calls import TensorMeta, bytes_of
from raymod.errors import GangError
from raymod.machine import TOKEN_BYTES, new_token, open_by_token, path_of
from raymod.transport import gpu
from raymod.transport.unchanged import Content

__all__ = ["HEAD_BYTES", "CannotOpenError", "Pool", "Segment", "Ticket", "Window"]

HEAD_BYTES = 64  # the token, and up to the next cache line
_KEY_BYTES = 8
_MIN_BYTES = 64 << 10
# So many segments, and bytes in them, are kept for content that comes again and again.
_KEEP = 4
_KEEP_BYTES = 256 << 20
# A segment that so many others were preferred to is given up.
_IDLE = 16


class CannotOpenError(GangError):
    """A segment is not to be had in this process: another machine, another container, gone."""


@dataclass(frozen=True)
class Ticket:
    """How another process opens a segment.

    Attributes:
        path: `/proc/<pid>/fd/<n>`.
        size: Size in bytes.
        token: Its first bytes.
    """

    path: str
    size: int
    token: bytes

    @property
    def key(self) -> bytes:
        """A short name that no other segment has."""
        return self.token[:_KEY_BYTES]

    def open(self, *, write: bool = False) -> int:
        """A file descriptor of the segment.

        Args:
            write: Whether it has to be writable, which what a GPU is to read has to be.

        Raises:
            CannotOpenError: It is not to be had here.
        """
        try:
            return open_by_token(self.path, size=self.size, token=self.token, write=write)
        except OSError as error:
            raise CannotOpenError(str(error)) from error


class Segment:
    """The owner's side: memory to write to.

    Args:
        size: Size in bytes, head included.

    Attributes:
        bytes: All of it, as a flat `uint8` tensor.
        content: What was written last; None while it is being written.
        used_at: When it was taken last, in the pool's count.

    Raises:
        GangError: There is no such memory to be had.
    """

    def __init__(self, size: int) -> None:
        self.content: Content | None = None
        self.used_at = 0
        self._parcel: weakref.ref[Any] | None = None
        self._pinned: bool | None = None
        token = new_token()
        try:
            self._fd = _memory_file(size)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            shared = mmap.mmap(self._fd, size, flags=flags)
        except OSError as error:
            raise GangError(f"no {size >> 20} MiB of shared memory for a call: {error}") from error
        self.ticket = Ticket(path_of(self._fd), size, token)
        shared[:TOKEN_BYTES] = token
        with torch.inference_mode(False):  # written to in either mode later
            self.bytes = torch.frombuffer(shared, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Size in bytes, head included."""
        return self.ticket.size

    def pin(self) -> None:
        """Have a GPU write to it without a copy in between, if that can be. Twice is the same."""
        if self._pinned is None:
            self._pinned = gpu.pin(self.bytes)

    def lend(self, parcel: Any) -> None:
        """Taken until `parcel` is gone."""
        self._parcel = weakref.ref(parcel)

    def is_free(self) -> bool:
        """Whether nobody reads it nor will."""
        if self._parcel is not None and self._parcel() is not None:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Let go of it; readers keep what they have mapped. Twice is not worse."""
        if self._fd >= 0:
            if self._pinned:
                gpu.unpin(self.bytes)
            os.close(self._fd)
            self._fd = -1
            self.bytes = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class Pool:
    """The segments of one process, used over and over."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._recent: deque[Content] = deque(maxlen=_KEEP)
        self._count = 0

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The names of all segments there are."""
        return tuple(segment.ticket.key for segment in self._segments)

    def take(self, need: int, content: Content) -> Segment:
        """A free segment of at least `need` bytes, if possible one that holds `content` already.

        One more is made when content comes again that a later call's has replaced: calls take
        turns then, such as those of a prompt and its negative.
        """
        self._count += 1
        best = self._best(need, content)
        if best is not None and self._may_grow(len(self._segments) + 1, need):
            seen = max(map(content.shared_bytes, self._recent), default=0)
            if seen > content.shared_bytes(best.content):
                best = None
        if best is None:
            best = Segment(_rounded(need))
            self._segments.append(best)
        self._recent.append(content)
        best.used_at = self._count
        self._age()
        return best

    def skip(self) -> bool:
        """Count a parcel that needs no segment; whether one was given up for it."""
        self._count += 1
        return self._age()

    def forget(self) -> None:
        """Let go of all that are free."""
        self._recent.clear()
        self._drop(segment for segment in list(self._segments) if segment.is_free())

    def close(self) -> None:
        """Let go of all; readers keep what they have mapped."""
        self._drop(list(self._segments))

    def _best(self, need: int, content: Content) -> Segment | None:
        """Of the free segments that are large enough the one that holds most of `content`."""
        order = sorted(
            (-content.shared_bytes(segment.content), segment.used_at, index)
            for index, segment in enumerate(self._segments)
            if need <= segment.size <= 4 * need + (1 << 20)
        )
        segments = (self._segments[index] for *_, index in order)
        return next((segment for segment in segments if segment.is_free()), None)

    def _age(self) -> bool:
        """Give up what so many others were preferred to."""
        old = [
            segment
            for segment in self._segments
            if self._count - segment.used_at >= _IDLE and segment.is_free()
        ]
        self._drop(old)
        return bool(old)

    def _may_grow(self, count: int, need: int) -> bool:
        return count <= _KEEP and count * need <= _KEEP_BYTES

    def _drop(self, segments: Any) -> None:
        for segment in segments:
            self._segments.remove(segment)
            segment.close()


class Window:
    """A reader's side of one segment.

    Its memory is mapped copy-on-write, so that a tensor over it is private to write to. The
    mapping is used again and again, unless something was written to it.

    Raises:
        CannotOpenError: The segment is not to be had here.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._size = ticket.size
        self._fd = ticket.open()
        self._map: mmap.mmap | None = None
        self._whole: torch.Tensor | None = None
        self._pinned = False
        self._lease: weakref.ref[memoryview] | None = None
        self._settled = True
        self._dropped = False

    @property
    def is_leased(self) -> bool:
        """Whether tensors over its memory are in use."""
        return self._lease is not None and self._lease() is not None

    def lease(self) -> memoryview | None:
        """All of its memory, for tensors to be made over; None while there is another lease.

        The owner writes nothing to it until they are gone.
        """
        if self.is_leased:
            return None
        self.settle()
        if self._map is None:
            self._map = mmap.mmap(self._fd, self._size, access=mmap.ACCESS_COPY)
        fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        view = memoryview(self._map)
        self._settled = False
        self._lease = weakref.ref(view, self._end_of_lease)
        return view

    def settle(self) -> None:
        """Give up the mapping if what was leased has been written to. Twice is not worse."""
        if self._settled or self.is_leased:
            return
        if self._map is not None and _has_private_pages(self._map):
            self._map = None
        self._settled = True

    def copy(self, offset: int, meta: TensorMeta) -> torch.Tensor:
        """A tensor of its own with the bytes at `offset`."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype)
        left = bytes_of(tensor).numpy().data
        while left:
            done = os.preadv(self._fd, [left], offset)
            if done == 0:
                raise CannotOpenError("a segment of shared memory ends early")
            left, offset = left[done:], offset + done
        return tensor

    def whole(self) -> torch.Tensor:
        """The very memory that its owner writes to, pinned if that can be, for a GPU to read.

        Only for as long as the owner does not write to it.

        Raises:
            CannotOpenError: It is not to be had here.
        """
        if self._whole is None:
            # pages of the copy-on-write mapping would be copied when they are pinned, and go stale
            fd = self._ticket.open(write=True)
            try:
                shared = mmap.mmap(fd, self._size, flags=mmap.MAP_SHARED)
            finally:
                os.close(fd)
            self._whole = torch.frombuffer(shared, dtype=torch.uint8)
            self._pinned = gpu.pin(self._whole)
        return self._whole

    def drop(self) -> None:
        """Let go of it, at the latest when its tensors are gone."""
        self._dropped = True
        self._map = None
        if not self.is_leased:
            self.close()

    def close(self) -> None:
        """Let go of it; when the owner writes no more. Tensors keep what they have."""
        self._map = None
        if self._whole is not None and self._pinned:
            gpu.unpin(self._whole)
        self._whole, self._pinned = None, False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_of_lease(self, _: Any) -> None:
        if self._fd < 0:
            return
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        if self._dropped:
            self.close()

    def __del__(self) -> None:
        # a lease that is still out outlives the window: its lock goes with the process
        if getattr(self, "_fd", -1) >= 0 and not self.is_leased:
            self.close()


def _memory_file(size: int) -> int:
    if sys.platform != "linux":
        raise OSError("only Linux has files without a name in memory")
    fd = os.memfd_create("raymod-call", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)  # too little memory is an error here, not a signal later
    except BaseException:
        os.close(fd)
        raise
    return fd


def _rounded(need: int) -> int:
    """`need` and up to an eighth more, for calls that grow little by little."""
    step = max(_MIN_BYTES, 1 << (need.bit_length() - 4))
    return -(-need // step) * step


def _has_private_pages(mapped: mmap.mmap) -> bool:
    """Whether a copy-on-write mapping has been written to; True where the system doesn't tell."""
    count = -(-len(mapped) // mmap.PAGESIZE)
    page = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() // mmap.PAGESIZE
    try:
        entries = os.pread(_page_map(os.getpid()), 8 * count, 8 * page)
    except OSError:
        return True
    # of each entry the byte with its flags, little-endian; what is left is of private pages
    flags = entries[7::8]
    return len(flags) != count or bool(flags.translate(None, _SHARED))


# The three upper bits: present, swapped, of a file.
_SHARED = bytes(flags for flags in range(256) if flags >> 5 == 0 or flags >> 5 & 1)


@lru_cache(maxsize=1)
def _page_map(pid: int) -> int:
    """A file descriptor of this process's page map; of another process after a fork."""
    return os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
