"""What every transport must do. A transport's test class inherits this and gives a `link`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch

from raymod.calls import Packed, bytes_of, pack, unpack
from raymod.transport import Parcel, Transport

MiB = 1 << 20


class Link(Protocol):
    """A sender in this process and at least two receivers in others."""

    transport: Transport

    def on_receivers(self, parcel: Parcel, probe: Callable[[Transport, Parcel], Any]) -> list[Any]:
        """`probe(transport, parcel)` on each receiver, at once."""

    def reply(self, make: Callable[[], Any]) -> Parcel:
        """What a receiver returns for `make()`, packed."""

    def left_over(self) -> int:
        """How many objects the transport holds."""


def zoo() -> list[torch.Tensor]:
    """One tensor of each kind, after packing: dense and contiguous."""
    torch.manual_seed(0)
    noise = torch.randn(3, 5, 7)
    return [
        noise,
        noise.double(),
        noise.half(),
        noise.bfloat16(),
        noise > 0,
        (noise * 1e6).long(),
        (noise * 50).to(torch.int8),
        torch.complex(noise, -noise),
        noise.to(torch.float8_e4m3fn),
        torch.tensor(2.5),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.bfloat16),
        torch.randn(1),
        torch.randn(1 << 15)[5:20001],
        torch.randn(6, 4).t(),
        torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40]),
    ]


def digest(tensors: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and content of each tensor."""
    return [
        (
            str(t.dtype),
            tuple(t.shape),
            hashlib.sha256(bytes_of(t.contiguous()).numpy().tobytes()).hexdigest(),
        )
        for t in tensors
    ]


def digest_of(transport: Transport, parcel: Parcel) -> Any:
    return digest(transport.receive(parcel).tensors)


def digest_three_times(transport: Transport, parcel: Parcel) -> Any:
    return [digest_of(transport, parcel) for _ in range(3)]


def spoil(transport: Transport, parcel: Parcel) -> bool:
    """Overwrites what it received; tells whether a second look still gives the original."""
    first = transport.receive(parcel)
    kept = [tensor.clone() for tensor in first.tensors]
    for tensor in first.tensors:
        tensor.zero_()
        tensor.add_(1)
    again = transport.receive(parcel).tensors
    return all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def outlive(transport: Transport, parcel: Parcel) -> Any:
    packed = transport.receive(parcel)
    del parcel
    time.sleep(0.05)
    return digest(packed.tensors)


KEPT: list[Any] = []


def keep(transport: Transport, parcel: Parcel) -> None:
    """Keeps in the receiver what it received."""
    KEPT.extend(transport.receive(parcel).tensors)


def give_back(transport: Transport, parcel: Parcel) -> Any:
    kept = digest(KEPT)
    KEPT.clear()
    return kept


def unpacked(transport: Transport, parcel: Parcel) -> Any:
    return unpack(transport.receive(parcel))


class TransportConformance:
    """Inherit, name the class `Test...`, and give a class-scoped fixture `link`."""

    @pytest.fixture(autouse=True)
    def _nothing_left_over(self, link: Link) -> Iterator[None]:
        yield
        link.transport.forget()
        deadline = time.monotonic() + 10
        while link.left_over() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert link.left_over() == 0

    def test_every_kind_of_tensor_arrives_bit_for_bit(self, link: Link) -> None:
        tensors = zoo()
        results = link.on_receivers(link.transport.send(pack(tensors)), digest_of)
        assert len(results) >= 2
        assert all(result == digest(tensors) for result in results)

    def test_tensors_arrive_however_they_lie(self, link: Link) -> None:
        noise = torch.randn(300, 400)
        with torch.inference_mode():
            made_in_inference_mode = torch.randn(100, 200)
        tensors = [
            noise.t(),
            noise[::3, 5:-1:2],
            noise.bfloat16().t(),
            noise.half()[:, 1::2],
            (noise > 0).t(),
            (noise * 1e6).long()[::2],
            noise[0].expand(50, 400),
            torch.randn(4, 3, 100, 100).to(memory_format=torch.channels_last),
            torch.complex(noise, -noise).conj(),
            torch.complex(noise, -noise).conj().imag,
            noise[:0].t(),
            noise[7, 9],
            torch.nn.Parameter(noise)[1:],
            made_in_inference_mode.t(),
        ]
        expected = digest(t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors)
        for _ in range(2):  # the second time there is something to compare with
            parcel = link.transport.send(pack(tensors, as_it_is=True))
            assert link.on_receivers(parcel, digest_of) == [expected] * 2

    def test_structure_arrives(self, link: Link) -> None:
        call = ((1, None), {"nested": {"flags": [True, "text"], "range": range(3)}})
        assert link.on_receivers(link.transport.send(pack(call)), unpacked)[1] == call

    @pytest.mark.parametrize(
        "nbytes", [0, 1, 65_000, 65_536, 70_001, MiB, 64 * MiB], ids=lambda n: f"{n}B"
    )
    def test_every_size_arrives(self, link: Link, nbytes: int) -> None:
        tensor = torch.arange(nbytes // 4 + 1, dtype=torch.int32).view(torch.uint8)[:nbytes]
        for result in link.on_receivers(link.transport.send(pack([tensor])), digest_of):
            assert result == digest([tensor])

    def test_a_large_structure_arrives(self, link: Link) -> None:
        content = bytes(range(256)) * 4096
        for result in link.on_receivers(link.transport.send(pack(content)), unpacked):
            assert result == content

    @pytest.mark.parametrize("count", [10, 1_000_000])
    def test_a_parcel_can_be_received_any_number_of_times(self, link: Link, count: int) -> None:
        tensor = torch.randn(count)
        parcel = link.transport.send(pack(tensor))
        for _ in range(2):
            for results in link.on_receivers(parcel, digest_three_times):
                assert results == [digest([tensor])] * 3
        assert digest(link.transport.receive(parcel).tensors) == digest([tensor])

    @pytest.mark.parametrize("count", [10, 1_000_000])
    def test_what_was_received_is_private_and_writable(self, link: Link, count: int) -> None:
        tensor = torch.randn(count)
        kept = tensor.clone()
        parcel = link.transport.send(pack(tensor))
        assert all(link.on_receivers(parcel, spoil))
        assert link.on_receivers(parcel, digest_of)[0] == digest([kept])
        assert torch.equal(tensor, kept)

    @pytest.mark.parametrize("count", [10, 1_000_000])
    def test_the_sender_may_change_its_tensors(self, link: Link, count: int) -> None:
        tensor = torch.randn(count)
        sent = digest([tensor])
        parcel = link.transport.send(pack(tensor))
        tensor.fill_(7)
        assert link.on_receivers(parcel, digest_of)[0] == sent

    @pytest.mark.parametrize("count", [10, 1_000_000])
    def test_tensors_outlive_the_parcel(self, link: Link, count: int) -> None:
        tensor = torch.randn(count)
        parcel = link.transport.send(pack(tensor))
        assert link.on_receivers(parcel, outlive)[0] == digest([tensor])
        mine = link.transport.receive(parcel)
        del parcel
        assert digest(mine.tensors) == digest([tensor])

    @pytest.mark.parametrize("count", [10, 100_000])
    def test_tensors_outlive_what_is_sent_later(self, link: Link, count: int) -> None:
        sent = [torch.full((count,), float(n)) for n in range(4)]
        for tensor in sent:
            link.on_receivers(link.transport.send(pack(tensor)), keep)
        for n in range(8):
            link.on_receivers(link.transport.send(pack(torch.full((count,), -1.0 - n))), digest_of)
        assert link.on_receivers(link.transport.send(pack(0)), give_back) == [digest(sent)] * 2

    @pytest.mark.parametrize("count", [10, 100_000])
    def test_what_arrives_is_what_was_sent_last(self, link: Link, count: int) -> None:
        tensor, constant = torch.zeros(count), torch.ones(count)
        for n in range(6):
            tensor.numpy()[n % 3 * 4] += n
            parcel = link.transport.send(pack([tensor, constant]))
            assert 0 <= parcel.reused_bytes < parcel.nbytes
            assert link.on_receivers(parcel, digest_of) == [digest([tensor, constant])] * 2

    @pytest.mark.parametrize("nbytes", [0, 1000, 70_001, MiB, 64 * MiB], ids=lambda n: f"{n}B")
    def test_replies_come_back(self, link: Link, nbytes: int) -> None:
        parcel = link.reply(lambda: torch.full((nbytes,), 7, dtype=torch.uint8))
        packed = link.transport.receive(parcel)
        del parcel
        (tensor,) = packed.tensors
        tensor.add_(1)  # ours to write to
        assert torch.equal(tensor, torch.full((nbytes,), 8, dtype=torch.uint8))

    def test_a_reply_of_every_kind_comes_back(self, link: Link) -> None:
        packed: Packed = link.transport.receive(link.reply(zoo))
        assert digest(unpack(packed)) == digest(zoo())

    @pytest.mark.parametrize("count", [10, 5000], ids=["inline", "placed"])
    def test_what_calls_of_another_kind_need_no_more_is_let_go(
        self, link: Link, count: int
    ) -> None:
        link.on_receivers(link.transport.send(pack(torch.zeros(50_000))), digest_of)
        before = self.held_bytes(link)
        for n in range(3):
            large = torch.full((4 << 20,), float(n))
            link.on_receivers(link.transport.send(pack(large)), digest_of)
        assert self.held_bytes(link) > before + 15 * MiB
        for n in range(40):
            small = torch.full((count,), float(n))
            assert link.on_receivers(link.transport.send(pack(small)), digest_of)
        deadline = time.monotonic() + 10
        while self.held_bytes(link) > before + MiB and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.held_bytes(link) <= before + MiB

    def held_bytes(self, link: Link) -> int:
        """How much memory the transport holds, at all ends together."""
        raise NotImplementedError

    def test_sending_again_and_again_leaves_nothing(self, link: Link) -> None:
        tensor = torch.randn(50_000)
        for _ in range(50):
            parcel = link.transport.send(pack(tensor))
            link.on_receivers(parcel, digest_of)
        assert link.left_over() <= 2  # this parcel and one that is going
