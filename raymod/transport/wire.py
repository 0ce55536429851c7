"""Messages between the driver and a rank of its node, over a local socket.

The socket's address is not in the file system, so nothing of it can be left behind. Both ends make
sure that the other is the same user, and who connects has to know a token.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import select
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raymod.calls import Packed
from raymod.transport.base import Parcel, Transport

__all__ = ["LineTicket", "Listener", "Wire", "WireClosedError", "connect"]

_TOKEN_BYTES = 32
_BACKLOG = 1024
_KNOCK_S = 5.0
_NUMBER = struct.Struct("=Q?")
# What is longer goes through the transport; the system's own limit is three times as much.
_LONGEST_BYTES = 64 << 10
_READ_BYTES = 2 * _LONGEST_BYTES


class WireClosedError(ConnectionError):
    """The other end is gone, or this one was closed."""


@dataclass(frozen=True)
class LineTicket:
    """How a rank reaches the driver that it is to serve.

    Attributes:
        address: Of the driver's socket.
        token: What to show there.
        probe: A parcel to open, and to send back.
    """

    address: str
    token: bytes
    probe: Parcel


class Wire:
    """One end of a connection. A message is a number and an object that pickles.

    Args:
        sock: Connected.
        transport: For objects that are too long for a message.
    """

    def __init__(self, sock: socket.socket, transport: Transport) -> None:
        self._sock = sock
        self._transport = transport
        self._last_read: tuple[bytes, Any] = (b"", None)

    def fileno(self) -> int:
        """Its file descriptor; -1 when closed."""
        return self._sock.fileno()

    def encode(self, obj: Any) -> tuple[bool, bytes]:
        """What `send_encoded` sends; good for all wires of one transport."""
        data = pickle.dumps(obj, protocol=5)
        if len(data) <= _LONGEST_BYTES:
            return False, data
        return True, pickle.dumps(self._transport.reply(Packed(data, ())), protocol=5)

    def send(self, number: int, obj: Any) -> None:
        """Send a message, all of it or none.

        Raises:
            WireClosedError: Nobody can receive it.
        """
        self.send_encoded(number, self.encode(obj))

    def send_encoded(self, number: int, encoded: tuple[bool, bytes]) -> None:
        """See `send`."""
        is_long, data = encoded
        try:
            self._sock.send(_NUMBER.pack(number, is_long) + data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise WireClosedError(str(error)) from error

    def receive(self, *, wait: bool) -> Message | None:
        """The next message.

        Args:
            wait: Whether to wait for one, without limit. Else the result is None if there is none.

        Raises:
            WireClosedError: There will be none.
        """
        try:
            data = self._sock.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise WireClosedError(str(error)) from error
        if not data:
            raise WireClosedError("the other end is gone")
        number, is_long = _NUMBER.unpack_from(data)
        return Message(number, is_long, data[_NUMBER.size :])

    def read(self, message: Message) -> Any:
        """The object of a message: the very same as the last one, if the message is.

        Calls often are, but for their number: what differs lies in shared memory.
        """
        data = message.data
        if message.is_long:
            return pickle.loads(self._transport.receive(pickle.loads(data)).skeleton)
        if data != self._last_read[0]:
            self._last_read = data, pickle.loads(data)
        return self._last_read[1]

    def close(self) -> None:
        """End the connection; who waits at either end is told. Twice is not worse."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@dataclass(frozen=True)
class Message:
    """A message as it arrived."""

    number: int
    is_long: bool
    data: bytes


class Listener:
    """Where ranks connect.

    Args:
        transport: For the wires.

    Raises:
        OSError: This system has no such sockets.
    """

    def __init__(self, transport: Transport) -> None:
        self.address = f"\0raymod-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._transport = transport
        self._sock = _socket()
        try:
            self._sock.bind(self.address)
            self._sock.listen(_BACKLOG)
        except BaseException:
            self._sock.close()
            raise

    def accept(self, timeout_s: float) -> Wire | None:
        """A wire to who connects within `timeout_s` and may; None if nobody does."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return None
        sock, _ = self._sock.accept()
        try:
            sock.settimeout(_KNOCK_S)
            if _is_same_user(sock) and hmac.compare_digest(sock.recv(_TOKEN_BYTES), self.token):
                sock.settimeout(None)
                return Wire(sock, self._transport)
        except OSError:
            pass
        sock.close()
        return None

    def close(self) -> None:
        """Nobody can connect any more."""
        self._sock.close()


def connect(ticket: LineTicket, transport: Transport) -> Wire:
    """The rank's end.

    Raises:
        OSError: The driver is not to be reached from here, or somebody else is there.
    """
    sock = _socket()
    try:
        sock.settimeout(_KNOCK_S)
        sock.connect(ticket.address)
        if not _is_same_user(sock):
            raise PermissionError("the socket belongs to another user")
        sock.send(ticket.token, socket.MSG_NOSIGNAL)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return Wire(sock, transport)


def _socket() -> socket.socket:
    if sys.platform != "linux":
        raise OSError("only Linux has local sockets without a name")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _is_same_user(sock: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())
