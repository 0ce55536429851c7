"""What a gang tells its user: warnings, each of them once, and errors in a line."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Iterable

from raymod.errors import GangError, GangFailedError

__all__ = ["Warner", "failed_before", "first_line"]

_FIRST_LINE = 300  # characters


class Warner:
    """Says each text once, at the line of the user's that led there."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, texts: Iterable[str]) -> None:
        """Say those of `texts` that have not been said."""
        for text in texts:
            if text not in self._said:
                self._said.add(text)
                warnings.warn(text, UserWarning, stacklevel=_users_level())


def first_line(error: Exception) -> str:
    """The first line of what an error says, cut between words where it is long."""
    return textwrap.shorten(str(error).partition("\n")[0], _FIRST_LINE, placeholder=" ...")


def failed_before(failure: GangError) -> GangFailedError:
    """What a request to a gang is answered that `failure` has ended; that is its cause."""
    error = GangFailedError(
        f"the gang ended in an earlier failure ({type(failure).__name__}: {first_line(failure)})"
    )
    error.__cause__ = failure
    return error


def _users_level() -> int:
    """The stack level of the nearest caller outside raymod and torch, seen from the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in ("raymod", "torch"):
            break
        frame, level = frame.f_back, level + 1
    return level
