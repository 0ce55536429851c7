"""Files without a name, which another process opens through the one that has them open.

Nothing has a name, so nothing can be left behind, whatever ends its owner. A path such as
`/proc/<pid>/fd/<n>` may lead to something else in another pid namespace, or later; so a file is
known by a token at its head.
"""

from __future__ import annotations

import os
import secrets
import stat

__all__ = ["TOKEN_BYTES", "new_token", "open_by_token", "path_of"]

TOKEN_BYTES = 32


def new_token() -> bytes:
    """A token that no other file has."""
    return secrets.token_bytes(TOKEN_BYTES)


def path_of(fd: int) -> str:
    """Where processes of this user and pid namespace find what is open here as `fd`."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_by_token(path: str, *, size: int, token: bytes, write: bool = False) -> int:
    """A file descriptor to read from; never waits.

    Args:
        path: Where the file was.
        size: Its size in bytes.
        token: Its first bytes.
        write: To write to as well.

    Raises:
        OSError: It is not to be had in this process, or is another file.
    """
    try:
        fd = os.open(
            path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        )
    except OSError as error:
        raise OSError(f"{path} cannot be opened here: {error}") from error
    info = os.fstat(fd)
    is_it = stat.S_ISREG(info.st_mode) and info.st_size == size
    if is_it and os.pread(fd, len(token), 0) == token:
        return fd
    os.close(fd)
    raise OSError(f"{path} is another file here: the token does not match")
