"""What a gang has to undo, in reverse order, once, whoever asks first."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["Cleanup"]

logger = logging.getLogger(__name__)

_open: set[Cleanup] = set()
_registered = threading.Event()


class Cleanup:
    """Undoes steps in reverse order: each is registered as soon as what it undoes exists.

    Runs at the latest when the interpreter exits, before Ray's own exit handler. A process that
    was forked off runs nothing: the ranks belong to its parent.
    """

    def __init__(self) -> None:
        self._steps = ExitStack()
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def add(self, step: Callable[..., Any], *args: Any) -> None:
        """Run `step(*args)` before the steps added earlier."""
        _open.add(self)
        if not _registered.is_set():
            _registered.set()
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_forget_ray)
        self._steps.callback(_guarded, step, args)

    def is_forked(self) -> bool:
        """Whether this is another process than the one that has something to undo."""
        return os.getpid() != self._pid

    def run(self) -> None:
        """Undo everything; returns when it is undone, also if another thread does it."""
        if self.is_forked():
            return
        with self._lock:
            self._steps.close()
            _open.discard(self)

    def run_apart(self) -> None:
        """Undo everything in another thread; for the garbage collector, which may be anywhere."""
        if not self.is_forked():
            threading.Thread(target=self.run, name="raymod-cleanup", daemon=True).start()


def _guarded(step: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        step(*args)
    except Exception:  # the other steps must run too
        logger.debug("cleaning up: %s failed", step, exc_info=True)


def _at_exit() -> None:
    for cleanup in list(_open):
        cleanup.run()


def _forget_ray() -> None:
    """Ray's threads are not in a process that was forked off: its exit handler would hang there."""
    if "ray" in sys.modules:
        atexit.unregister(sys.modules["ray"].shutdown)
