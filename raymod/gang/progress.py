"""What the gang says while it starts."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

__all__ = ["PHASES", "Progress"]

logger = logging.getLogger("raymod")

PHASES = {
    "placing": "waiting for devices",
    "starting": "starting the ranks",
    "joining": "joining the ranks",
    "loading": "moving the weights",
    "splitting": "splitting the model",
    "ready": "ready",
}

_FIRST_NOTE_S = 2.0
_NOTE_FACTOR = 2.0
_MAX_NOTE_S = 60.0


class Progress:
    """Follows the phases of one start: times them, and says them.

    On a terminal it is one line that changes; elsewhere a log line a phase, at level INFO. It is
    silent where the level of the logger `raymod` is set above INFO.

    Args:
        tell: Called with the name of each phase instead, if given.
        stream: The terminal, if it is one. None: standard error.

    Attributes:
        phases: Seconds of each phase so far.
    """

    def __init__(
        self, tell: Callable[[str], None] | None = None, stream: TextIO | None = None
    ) -> None:
        self.phases: dict[str, float] = {}
        self._tell = tell
        self._stream = stream if stream is not None else sys.stderr
        self._began = self._since = time.monotonic()
        self._phase: str | None = None
        self._next_note_s = _FIRST_NOTE_S
        self._width = 0

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self._phase or "starting"

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before is over."""
        now = time.monotonic()
        self._finish(now)
        self._phase, self._since, self._next_note_s = phase, now, _FIRST_NOTE_S
        if self._tell is not None:
            self._tell(phase)
        elif phase == "ready":
            self._say(f"ready after {now - self._began:.1f} s", last=True)
        else:
            self._say(PHASES.get(phase, phase))

    def note(self, text: Callable[[], str]) -> None:
        """Say `text()` if the phase takes long: first after 2 s, then ever more rarely."""
        passed = time.monotonic() - self._since
        if self._tell is not None or passed < self._next_note_s:
            return
        self._next_note_s = passed + min(_MAX_NOTE_S, passed * (_NOTE_FACTOR - 1))
        self._say(f"{PHASES.get(self.phase, self.phase)} ({passed:.0f} s): {text()}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finish(time.monotonic())
        if error is not None and self._width:
            self._write("", end="\r")  # the error speaks for itself

    def _finish(self, now: float) -> None:
        if self._phase is not None:
            self.phases[self._phase] = self.phases.get(self._phase, 0.0) + now - self._since
        self._phase = None

    def _say(self, text: str, *, last: bool = False) -> None:
        if logger.level > logging.INFO or logger.disabled:
            return
        if self._is_terminal():
            self._write(f"raymod: {text}", end="\n" if last else "")
        else:
            logger.info("%s", text)

    def _write(self, text: str, *, end: str) -> None:
        text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line cannot be redrawn
        padding = " " * max(0, self._width - len(text))
        self._width = len(text)
        self._stream.write(f"\r{text}{padding}{end}")
        self._stream.flush()

    def _is_terminal(self) -> bool:
        try:
            return self._stream.isatty()
        except (AttributeError, ValueError):  # no stream at all, or a closed one
            return False
