"""The transport through shared memory, and what it does not send again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raymod.calls import pack
from raymod.errors import GangError
from raymod.transport import Parcel, SharedTransport, Transport
from raymod.transport.segments import CannotOpenError, Ticket, _page_map
from tests.transport.conformance import MiB, TransportConformance, digest
from tests.transport.peers import Peer
from tests.transport.unchanged import EMBEDDINGS, UnchangedConformance


class SharedLink:
    def __init__(self) -> None:
        self.transport: Transport = SharedTransport()
        self.peers = [Peer() for _ in range(2)]

    def on_receivers(self, parcel: Parcel, probe: Callable[[Transport, Parcel], Any]) -> list[Any]:
        for peer in self.peers:
            peer.begin(lambda transport, kept, parcel: probe(transport, parcel), parcel)
        return [peer.end() for peer in self.peers]

    def reply(self, make: Callable[[], Any]) -> Parcel:
        return self.peers[0].run(lambda transport, kept: transport.reply(pack(make())))

    def left_over(self) -> int:
        assert isinstance(self.transport, SharedTransport)
        return self.transport.segments

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@pytest.fixture(scope="module")
def shared_link() -> Iterator[SharedLink]:
    link = SharedLink()
    yield link
    link.close()


def mapped_bytes(transport: Any, parcel: Any) -> int:
    """Size of the segments that this process has mapped, its own and others'."""
    spans = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "raymod-call" in line
    ]
    return sum(int(high, 16) - int(low, 16) for low, high in spans)


class TestSharedTransport(TransportConformance):
    def held_bytes(self, link: Any) -> int:
        own: int = mapped_bytes(None, None)
        return own + sum(link.on_receivers(None, mapped_bytes))

    @pytest.fixture
    def link(self, shared_link: SharedLink) -> SharedLink:
        return shared_link


@pytest.fixture
def sender() -> Iterator[SharedTransport]:
    sender = SharedTransport()
    yield sender
    sender.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def send(sender: SharedTransport, *tensors: torch.Tensor) -> Parcel:
    return sender.send(pack(tensors, as_it_is=True))


def look(transport: SharedTransport, kept: Any, parcel: Parcel) -> Any:
    return digest(transport.receive(parcel).tensors)


def keep(transport: SharedTransport, kept: Any, parcel: Parcel) -> None:
    kept.setdefault("tensors", []).extend(transport.receive(parcel).tensors)


def kept_now(transport: SharedTransport, kept: Any) -> Any:
    return digest(kept.pop("tensors"))


# -- where tensors lie -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(400, 300).t(),
        lambda: torch.randn(50, 60, 70)[:, ::3, 5:],
        lambda: torch.randn(300).expand(400, 300),
        lambda: torch.randn(4, 3, 100, 100).to(memory_format=torch.channels_last),
        lambda: torch.complex(torch.randn(9000), torch.randn(9000)).conj(),
        lambda: torch.complex(torch.randn(9000), torch.randn(9000)).conj().imag,
        lambda: torch.randn(100_000).bfloat16()[::2],
        lambda: torch.nn.Parameter(torch.randn(100, 200)),
    ],
)
def test_one_copy_from_any_strides(
    sender: SharedTransport, peer: Peer, make: Callable[[], torch.Tensor]
) -> None:
    tensor = make()
    for _ in range(2):  # the second time there is something to compare with
        expected = tensor.detach().resolve_conj().resolve_neg().contiguous()
        assert peer.run(look, send(sender, tensor)) == digest([expected])


def test_tensors_begin_on_cache_lines(sender: SharedTransport, peer: Peer) -> None:
    def places(transport: SharedTransport, kept: Any, parcel: Parcel) -> list[int]:
        return [tensor.data_ptr() % 64 for tensor in transport.receive(parcel).tensors]

    tensors = [torch.randn(20_001 + n).to(torch.bfloat16) for n in range(4)]
    assert peer.run(places, send(sender, torch.tensor(True), *tensors)) == [0] * 5


def test_tensors_made_in_inference_mode(sender: SharedTransport, peer: Peer) -> None:
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            tensor = torch.randn(50_000)
            parcel = send(sender, tensor)
        assert peer.run(look, parcel) == digest([tensor])
        with torch.inference_mode(not mode):
            assert digest(sender.receive(parcel).tensors) == digest([tensor])


def test_large_tensors_are_not_copied_by_the_receiver(sender: SharedTransport, peer: Peer) -> None:
    def in_one_map(transport: SharedTransport, kept: Any, parcel: Parcel) -> list[bool]:
        tensors = transport.receive(parcel).tensors
        lines = Path("/proc/self/maps").read_text().splitlines()
        shared = [line.split()[0].split("-") for line in lines if "raymod-call" in line]
        spans = [(int(low, 16), int(high, 16)) for low, high in shared]
        return [any(low <= t.data_ptr() < high for low, high in spans) for t in tensors]

    parcel = send(sender, torch.randn(100_000), torch.tensor(1.0), torch.randn(200_000))
    assert peer.run(in_one_map, parcel) == [True, False, True]


# -- what receivers keep -----------------------------------------------------------------------


def test_what_a_receiver_keeps_is_never_overwritten(sender: SharedTransport, peer: Peer) -> None:
    """A module may keep its input, or a view of it, for as long as it likes."""
    sent = [torch.full((50_000,), float(n)) for n in range(20)]
    for tensor in sent:
        peer.run(keep, send(sender, tensor))
    for n in range(30):
        peer.run(look, send(sender, torch.full((50_000,), -1.0 - n)))
    assert peer.run(kept_now) == digest(sent)
    peer.run(look, send(sender, sent[0]))
    sender.forget()
    assert sender.segments == 0


def test_a_receivers_writes_are_gone_with_its_tensors(sender: SharedTransport, peer: Peer) -> None:
    """Pages that were written to must not hide what the sender writes there later."""

    def write(transport: SharedTransport, kept: Any, parcel: Parcel) -> Any:
        (tensor,) = transport.receive(parcel).tensors
        before = digest([tensor])
        tensor[40_000] = 7.0
        return before

    for n in range(5):
        tensor = torch.full((50_000,), float(n))
        assert peer.run(write, send(sender, tensor)) == digest([tensor])
    assert sender.segments == 1  # it was one segment all the time


def test_where_the_system_does_not_tell_of_writes(
    sender: SharedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr("raymod.transport.segments._page_map", refuse)
    receiver = SharedTransport()
    for n in range(4):
        (tensor,) = receiver.receive(send(sender, torch.full((50_000,), float(n)))).tensors
        assert (float(tensor.min()), float(tensor.max())) == (n, n)
        tensor.fill_(-1)
        del tensor
    assert sender.segments == 1
    receiver.close()


def test_after_a_fork_each_process_looks_at_its_own_pages() -> None:
    def looks_at() -> str:
        return os.readlink(f"/proc/self/fd/{_page_map(os.getpid())}")

    assert looks_at() == f"/proc/{os.getpid()}/pagemap"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if looks_at() == f"/proc/{os.getpid()}/pagemap" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_receiver_that_is_killed_holds_nothing(sender: SharedTransport) -> None:
    peer = Peer()
    peer.run(keep, send(sender, torch.randn(50_000)))
    sender.forget()
    assert sender.segments == 1
    assert peer.process.pid is not None
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.join(10)
    peer.close()
    sender.forget()
    assert sender.segments == 0


def test_a_reply_stays_until_the_second_one_after_it(peer: Peer) -> None:
    def reply(transport: SharedTransport, kept: Any, n: int) -> Parcel:
        return transport.reply(pack(torch.full((50_000,), float(n))))

    mine = SharedTransport()
    first, second = peer.run(reply, 1), peer.run(reply, 2)
    one = mine.receive(first).tensors[0]
    two = mine.receive(second).tensors[0]
    for n in range(3, 9):
        assert float(mine.receive(peer.run(reply, n)).tensors[0][0]) == n
    assert (float(one.min()), float(two.max())) == (1, 2)
    mine.close()
    assert float(one.sum()) == 50_000  # outlives the transport too


# -- bounds ------------------------------------------------------------------------------------


def open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_calls_of_changing_sizes_leave_no_more_than_the_last_ones_need(
    sender: SharedTransport, peer: Peer
) -> None:
    peer.run(look, send(sender, torch.randn(MiB)))
    largest = 0
    for n in range(60):
        peer.run(look, send(sender, torch.randn(20_000 + 3001 * (n % 7))))
        largest = max(largest, sender.segments)
    assert largest <= 5
    sizes = [segment.size for segment in sender._pool._segments]
    assert sum(sizes) < 2 * MiB, sizes  # the first, large one is gone


def test_many_calls_open_no_more_files(sender: SharedTransport, peer: Peer) -> None:
    def files(transport: SharedTransport, kept: Any) -> int:
        return open_files()

    for n in range(3):
        peer.run(look, send(sender, torch.randn(30_000 + n * 9000)))
    before = open_files(), peer.run(files)
    for n in range(100):
        peer.run(look, send(sender, torch.randn(30_000 + n % 3 * 9000)))
    after = open_files(), peer.run(files)
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 4


def test_no_memory_left_is_an_error_and_not_a_signal(
    sender: SharedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(GangError, match=r"MiB of shared memory for a call: .*No space left"):
            send(sender, torch.randn(50_000))
    assert open_files() == before
    assert send(sender, torch.randn(50_000)).nbytes > 200_000


# -- who may open it ---------------------------------------------------------------------------


def test_another_file_under_the_same_path_is_not_taken_for_it(sender: SharedTransport) -> None:
    parcel = send(sender, torch.randn(50_000))
    ticket: Ticket = parcel.payload.ticket
    for wrong in (
        replace(ticket, token=bytes(32)),
        replace(ticket, size=ticket.size + 1),
        replace(ticket, path=f"/proc/{os.getpid()}/fd/99999"),
        replace(ticket, path="/dev/zero"),
        replace(ticket, path="/proc/self/environ"),
    ):
        with pytest.raises(CannotOpenError):
            wrong.open()
    os.close(ticket.open())


def test_segments_have_no_name_and_no_child_inherits_them(sender: SharedTransport) -> None:
    parcel = send(sender, torch.randn(50_000))
    ticket: Ticket = parcel.payload.ticket
    assert os.readlink(ticket.path) == "/memfd:raymod-call (deleted)"
    assert not os.get_inheritable(int(ticket.path.rpartition("/")[2]))
    assert [name for name in os.listdir("/dev/shm") if "raymod" in name] == []


# -- what has not changed ----------------------------------------------------------------------


class TestUnchanged(UnchangedConformance):
    @pytest.fixture
    def link(self, shared_link: SharedLink) -> SharedLink:
        return shared_link


def test_prompts_that_take_turns_have_a_segment_each(sender: SharedTransport) -> None:
    one, other = torch.randn(EMBEDDINGS // 4), torch.randn(EMBEDDINGS // 4)
    for _ in range(6):
        latents = torch.randn(1000, 64)
        send(sender, latents, one)
        send(sender, latents, other)
    assert sender.segments == 2


def test_a_write_that_was_interrupted_is_not_trusted(
    sender: SharedTransport, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = torch.zeros(EMBEDDINGS // 4), torch.ones(EMBEDDINGS // 4)
    peer.run(look, send(sender, one, one.clone()))

    def interrupted(tensor: torch.Tensor, there: torch.Tensor, meta: Any) -> None:
        there[: len(there) // 2].view(torch.float32).fill_(1.0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("raymod.transport.shared._copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send(sender, other, one)
    for tensors in ((one, other), (other, one)):
        assert peer.run(look, send(sender, *tensors)) == digest(tensors)
