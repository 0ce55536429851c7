"""The local socket between driver and rank."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from raymod.calls import pack
from raymod.transport import Parcel, SharedTransport
from raymod.transport.wire import LineTicket, Listener, Wire, WireClosedError, connect

NO_PROBE = Parcel((), 0, ())


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(SharedTransport())
    yield listener
    listener.close()


def ticket(listener: Listener) -> LineTicket:
    return LineTicket(listener.address, listener.token, NO_PROBE)


@pytest.fixture
def wires(listener: Listener) -> Iterator[tuple[Wire, Wire]]:
    there = connect(ticket(listener), SharedTransport())
    here = listener.accept(5)
    assert here is not None
    yield here, there
    here.close()
    there.close()


def test_messages_keep_their_order_and_their_edges(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    assert here.receive(wait=False) is None
    sent = ["", "short", b"\0" * 60_000, ("answer", (1, None)), list(range(100))]
    for number, obj in enumerate(sent):
        there.send(number, obj)
    for number, obj in enumerate(sent):
        message = here.receive(wait=False)
        assert message is not None
        assert (message.number, here.read(message)) == (number, obj)
    assert here.receive(wait=False) is None


def test_a_long_message_goes_through_shared_memory(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    for size in (65_000, 66_000, 300_000, 5_000_000):
        here.send(size, os.urandom(1) * size)
        message = there.receive(wait=True)
        assert message is not None
        assert len(message.data) < 70_000
        assert len(there.read(message)) == message.number == size


def test_a_parcel_of_the_senders_can_be_received_there(listener: Listener) -> None:
    ours, theirs = SharedTransport(), SharedTransport()
    there = connect(ticket(listener), theirs)
    here = listener.accept(5)
    assert here is not None
    tensor = torch.randn(100_000)
    parcel = ours.send(pack(tensor))
    here.send(1, ("forward", (parcel,)))
    message = there.receive(wait=True)
    assert message is not None
    _, (received,) = there.read(message)
    assert torch.equal(theirs.receive(received).tensors[0], tensor)
    here.close()
    there.close()


def test_the_end_of_one_side_is_seen_by_the_other(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    there.send(7, "last words")
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            there.receive(wait=True)
        except WireClosedError as error:
            seen.append(error)

    thread = threading.Thread(target=wait)  # waits without a limit, and is woken up
    thread.start()
    here_fd = here.fileno()
    assert here_fd >= 0
    there_message = here.receive(wait=False)
    assert there_message is not None
    assert here.read(there_message) == "last words"
    here.close()
    thread.join(10)
    assert len(seen) == 1
    with pytest.raises(WireClosedError):
        there.send(8, "")
    with pytest.raises(WireClosedError):
        here.receive(wait=False)
    here.close()
    assert here.fileno() == -1


def test_what_cannot_be_pickled_leaves_the_wire_as_it_is(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    with pytest.raises(TypeError):
        there.send(1, threading.Lock())
    there.send(2, "fine")
    message = here.receive(wait=False)
    assert message is not None
    assert (message.number, here.read(message)) == (2, "fine")


def test_who_does_not_know_the_token_is_not_let_in(listener: Listener) -> None:
    stranger = connect(replace(ticket(listener), token=bytes(32)), SharedTransport())
    assert listener.accept(5) is None
    with pytest.raises(WireClosedError):
        stranger.receive(wait=True)
    stranger.close()
    assert listener.accept(0.01) is None


def test_who_says_nothing_does_not_block_the_others(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymod.transport.wire._KNOCK_S", 0.2)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(listener.address)
    other = connect(ticket(listener), SharedTransport())
    assert listener.accept(5) is None
    wire = listener.accept(5)
    assert wire is not None
    silent.close()
    other.close()
    wire.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in(listener: Listener) -> None:
    """Either side notices; here the child is another user that knows everything."""
    pid = os.fork()
    if pid == 0:
        refused = 1
        try:
            os.setuid(65534)
            try:
                connect(ticket(listener), SharedTransport())
            except PermissionError:  # it notices that the driver is another user
                refused = 0
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(listener.address)
                sock.send(listener.token)
                refused += len(sock.recv(1))
        finally:
            os._exit(refused)
    accepted = [listener.accept(5) for _ in range(2)]
    assert accepted == [None, None]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_address_is_in_no_file_system(listener: Listener) -> None:
    assert listener.address.startswith("\0raymod-")
    other = Listener(SharedTransport())
    assert other.address != listener.address
    other.close()
