"""The token of a Ray that raymod starts: its own, where the user has chosen none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

__all__ = ["has_mode", "has_token", "lend"]

_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_NAMES = (_TOKEN, "RAY_AUTH_TOKEN_PATH")
_TOKEN_BYTES = 32


def has_mode() -> bool:
    """Whether the user has turned token authentication on."""
    return os.environ.get(_MODE, "").lower() == "token"


def has_token() -> bool:
    """Whether Ray would find a token of the user's."""
    return _is_named() or (Path.home() / ".ray" / "auth_token").exists()


def lend() -> Callable[[], None]:
    """Give this process a token for the Ray that it is about to start.

    Ray would write one into the home folder otherwise, where it would stay, if that can be written
    to at all. Ray reads the variables as long as it runs, and again should the user start another
    one in its place; so they stay until then.

    Returns:
        What puts the environment back, once no Ray runs in this process.
    """
    is_off = os.environ.get(_MODE) is not None and not has_mode()
    if is_off or _is_named() or (has_mode() and has_token()):
        return lambda: None
    before = os.environ.get(_MODE)
    token = secrets.token_hex(_TOKEN_BYTES)
    os.environ.update({_MODE: "token", _TOKEN: token})
    _reread()

    def put_back() -> None:
        if os.environ.get(_TOKEN) == token:
            del os.environ[_TOKEN]
            if before is None:
                os.environ.pop(_MODE, None)
            else:
                os.environ[_MODE] = before
        _reread()

    return put_back


def _is_named() -> bool:
    return any(os.environ.get(name) for name in _NAMES)


def _reread() -> None:
    """Have Ray look at the environment again: it remembers both."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
