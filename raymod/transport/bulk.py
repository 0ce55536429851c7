"""Large pieces of memory, copied and compared by more than one core.

One core moves about half of what the memory of a machine can. The helpers are threads of this
process that run C code alone, so Python goes on meanwhile; waiting, they take no processor time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

__all__ = ["copy_bytes", "same_bytes"]

# What is smaller is done sooner than a thread wakes up.
_PIECE_BYTES = 1 << 20
_MOST_HELPERS = 3
_LINE_BYTES = 64


def copy_bytes(source: int, target: int, nbytes: int) -> None:
    """Copy bytes from one address to another; the two pieces do not overlap."""
    _each_piece(lambda at, size: ctypes.memmove(target + at, source + at, size), nbytes)


def same_bytes(one: int, other: int, nbytes: int) -> bool:
    """Whether the same bytes lie at two addresses.

    Bits, not numbers: -0.0 and 0.0 differ, and a NaN equals itself.
    """
    memcmp = _memcmp()
    return not any(_each_piece(lambda at, size: memcmp(one + at, other + at, size), nbytes))


def _each_piece(do: Callable[[int, int], Any], nbytes: int) -> list[Any]:
    """`do(offset, size)` for all pieces at once; none is under way when this returns or raises."""
    count = max(1, min(_helpers() + 1, nbytes // _PIECE_BYTES))
    each = max(1, -(-nbytes // count // _LINE_BYTES)) * _LINE_BYTES
    others: list[Future[Any]] = []
    try:
        for at in range(each, nbytes, each):
            others.append(_pool(os.getpid()).submit(do, at, min(each, nbytes - at)))
        first = do(0, min(each, nbytes))
        return [first, *(other.result() for other in others)]
    finally:
        if others:
            wait(others)


@lru_cache(maxsize=1)
def _helpers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(_MOST_HELPERS, (cores or 1) - 1)


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    """The helpers of this process; a fork has others."""
    return ThreadPoolExecutor(_helpers(), thread_name_prefix="raymod-bulk")


@lru_cache(maxsize=1)
def _memcmp() -> Any:
    # of the C library: it stops at the first difference, and other threads run meanwhile
    memcmp: Any = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcmp.restype = ctypes.c_int
    return memcmp
