"""What is pinned and when, with a stand-in for the GPU's runtime; see also tests/gpu."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymod.calls import pack
from raymod.transport import SharedTransport, gpu
from raymod.transport.segments import Segment, Window
from tests.transport.conformance import digest

CUDA = torch.device("cuda", 0)


class Runtime:
    """Takes note of what is pinned; refuses what is pinned already, as the real one does."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.asked = 0
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked += 1
        if self.refuses or address in self.pinned:
            return 712
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    yield runtime
    gc.collect()
    assert runtime.pinned == {}


@pytest.mark.parametrize("end", ["close", "forgotten"])
def test_a_segment_is_pinned_once_and_as_long_as_it_lives(runtime: Runtime, end: str) -> None:
    segment = Segment(1 << 16)
    assert runtime.asked == 0  # for tensors of a GPU only
    for _ in range(3):
        segment.pin()
    assert runtime.pinned == {segment.bytes.data_ptr(): 1 << 16}
    assert runtime.asked == 1
    if end == "close":
        segment.close()
    del segment
    gc.collect()
    assert runtime.pinned == {}


def test_where_it_cannot_be_pinned_nothing_is_undone(runtime: Runtime) -> None:
    runtime.refuses = True
    segment = Segment(1 << 16)
    segment.pin()
    segment.pin()
    segment.close()
    assert runtime.asked == 1


def test_without_a_gpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("asked"))
    assert not gpu.pin(torch.zeros(64, dtype=torch.uint8))


def test_the_gpu_reads_what_the_owner_wrote_last(runtime: Runtime) -> None:
    segment = Segment(1 << 16)
    window = Window(segment.ticket)
    assert int(window.whole()[5000]) == 0
    private = torch.frombuffer(window.lease(), dtype=torch.uint8)
    private[5000] = 9  # a page of the other mapping, copied on this write
    segment.bytes[5000] = 7
    assert int(window.whole()[5000]) == 7
    assert int(private[5000]) == 9
    assert runtime.pinned == {window.whole().data_ptr(): 1 << 16}
    window.close()
    segment.close()


def test_inputs_go_up_from_shared_memory_and_hold_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.device] = []

    def upload(parts: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
        seen.append(device)
        return tuple(part.clone() for part in parts)

    monkeypatch.setattr(gpu, "upload", upload)
    mine, theirs = SharedTransport(), SharedTransport()
    kept: list[Any] = []
    for number in range(4):
        sent = [torch.full((50_000,), float(number)), torch.tensor(3.5), torch.empty(0)]
        packed = theirs.receive(mine.send(pack(sent)), device=CUDA)
        assert digest(packed.tensors) == digest(sent)
        kept += packed.tensors
    assert seen == [CUDA] * 4
    assert mine.segments == 1  # nobody holds it, although what came of it is kept
    assert len(runtime.pinned) == 1
    theirs.close()
    mine.close()


def test_each_gpu_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    places = [CUDA, CUDA, torch.device("cpu"), torch.device("cuda", 1)]
    tensors: Any = [SimpleNamespace(device=place) for place in places]
    gpu.finish(tensors)
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]
