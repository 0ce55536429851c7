"""Ctrl-C at a moment when half of the work would be worse than none or all of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Of the C module: the wrappers around them take ten times as long, to make numbers into enums.
_getsignal: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_signal: Any = getattr(signal.signal, "__wrapped__", signal.signal)

__all__ = ["interrupt_deferred"]


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Hold back a Ctrl-C until the block is done; for short blocks.

    Python delivers it to the main thread only, so in other threads there is nothing to hold back.
    """
    before = _getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, Any]] = []
    _signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        _signal(signal.SIGINT, before)
        if held:
            before(*held[0])
