"""offer and load in one process: what arrives is what was there."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from raymod import weights
from raymod.errors import ConfigError, WeightsError
from raymod.weights import limits
from raymod.weights.files import SharedFile
from tests import models
from tests.weights.ranks import digest_of, tensors_of


def through_file(module: nn.Module, source: Any = "auto") -> nn.Module:
    with weights.offer(source, module) as offered:
        return weights.load(offered.ticket)


def through_pieces(module: nn.Module, piece_bytes: int = 1000) -> nn.Module:
    with weights.offer("memory", module) as offered:
        receiver = weights.Receiver(offered.ticket)
        for piece in offered.pieces(piece_bytes):
            assert piece.nbytes <= piece_bytes
            receiver.receive_piece(piece)
        try:
            return weights.load(receiver.ticket)
        finally:
            receiver.close()


WAYS = [through_file, through_pieces]


class Zoo(nn.Module):
    """Every kind of thing that a module holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(7, 5)
        self.half = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(3)  # kept in fp32
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.linear.weight
        self.register_buffer("steps", torch.arange(9))
        self.register_buffer("rope", torch.randn(6, 4).t(), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 5))
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("wave", torch.view_as_complex(torch.randn(3, 2)).conj())
        self.register_buffer("spaced", torch.randn(30, 40)[::3, ::2])
        self.register_buffer("wide", torch.randn(1, 50).expand(100, 50))
        self.register_buffer("absent", None)
        self.table = torch.randn(5)
        self.nested = {"more": [torch.randn(2), self.linear]}
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.tied(x) + self.table


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_weight_arrives(way: Callable[[nn.Module], Any]) -> None:
    module = Zoo()
    copy = way(module)
    assert digest_of(copy) == digest_of(module)
    assert copy.state_dict().keys() == module.state_dict().keys()  # rope is not persistent
    assert copy.tied.weight is copy.linear.weight
    assert copy.conv.weight.stride() == module.conv.weight.stride()
    assert copy.rope.stride() == module.rope.stride()
    assert torch.equal(copy.table, module.table)
    assert torch.equal(copy.nested["more"][0], module.nested["more"][0])
    assert copy.nested["more"][1] is copy.linear
    assert [p.requires_grad for p in copy.parameters()] == [
        p.requires_grad for p in module.parameters()
    ]
    assert copy.absent is None
    assert not copy.training
    x = torch.randn(2, 7)
    assert torch.equal(copy(x), module(x))


@pytest.mark.parametrize("way", WAYS)
def test_a_transformer_arrives_and_computes_the_same(way: Callable[[nn.Module], Any]) -> None:
    module, make_inputs = models.flux()
    copy = way(module)
    assert type(copy) is type(module)
    assert copy.config == module.config
    with torch.no_grad():
        assert torch.equal(copy(**make_inputs())[0], module(**make_inputs())[0])


def test_tensors_on_the_same_bytes_stay_tied_and_take_the_room_once() -> None:
    module = nn.Module()
    module.one = nn.Parameter(torch.randn(1000, 1000))
    module.two = nn.Parameter(module.one.detach())
    module.turned = module.one.detach().t()
    with weights.offer("auto", module) as offered:
        assert offered.ticket.file.size < 4_100_000
        copy = weights.load(offered.ticket)
    with torch.no_grad():
        copy.one[3, 4] = 77
    assert copy.two[3, 4] == 77
    assert copy.turned[4, 3] == 77
    assert module.one[3, 4] != 77


def test_the_copy_can_be_edited_and_the_original_does_not_change() -> None:
    module = Zoo()
    before = digest_of(module)
    copy = through_file(module)
    for name, tensor in tensors_of(copy).items():
        if name != "wide":
            with torch.no_grad():
                tensor.zero_()
    assert digest_of(module) == before
    assert copy.linear.weight.abs().sum() == 0


def test_the_users_module_is_not_changed() -> None:
    module = Zoo()
    module.register_forward_hook(lambda *_: None)
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    hooks = list(module._forward_hooks)
    through_file(module)
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == before
    assert list(module._forward_hooks) == hooks


def test_pieces_may_arrive_in_any_order_but_all_must() -> None:
    module = nn.Linear(100, 100)
    with weights.offer("auto", module) as offered:
        *most, last = reversed(list(offered.pieces(1 << 10)))
        assert len(most) > 30
        receiver = weights.Receiver(offered.ticket)
        for piece in most:
            receiver.receive_piece(piece)
        with pytest.raises(WeightsError, match=r"only \d+ of \d+ bytes"):
            _ = receiver.ticket
        receiver.receive_piece(last)
        assert digest_of(weights.load(receiver.ticket)) == digest_of(module)
        receiver.close()


def test_a_closed_offer_is_closed_and_what_was_loaded_stays() -> None:
    module = nn.Linear(3, 3)
    offered = weights.offer("auto", module)
    ticket = offered.ticket
    copy = weights.load(ticket)
    offered.close()
    offered.close()
    assert torch.equal(copy.weight, module.weight)
    assert not weights.can_open(ticket)
    with pytest.raises(WeightsError, match="closed"):
        _ = offered.ticket


def test_offers_leave_no_open_files() -> None:
    through_file(nn.Linear(3, 3))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        through_file(nn.Linear(3, 3))
        through_pieces(nn.Linear(3, 3))
    assert len(os.listdir("/proc/self/fd")) == before


# --- room ----------------------------------------------------------------------------------------


def test_without_memory_the_copy_goes_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 10_000)
    module = Zoo()
    with weights.offer("auto", module) as offered:
        target = os.readlink(offered.ticket.file.path)
        assert "memfd" not in target
        assert target.endswith("(deleted)") or not os.path.exists(target)  # has no name
        assert digest_of(weights.load(offered.ticket)) == digest_of(module)


def test_with_memory_the_copy_is_sealed_in_memory() -> None:
    with weights.offer("auto", nn.Linear(3, 3)) as offered:
        path = offered.ticket.file.path
        assert "memfd" in os.readlink(path)
        fd = os.open(path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
        finally:
            os.close(fd)


def test_without_any_room_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 600 << 20)
    monkeypatch.setattr(limits, "available_disk_bytes", lambda folder: 700 << 20)
    module = nn.Linear(8192, 8192, device="meta").to_empty(device="cpu")
    with (
        weights.offer("auto", module) as offered,
        pytest.raises(WeightsError, match=r"needs 256 MiB.*only 88 MiB of memory and 188 MiB"),
    ):
        _ = offered.ticket


def test_room_that_vanishes_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with weights.offer("auto", nn.Linear(3, 3)) as offered:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(WeightsError, match="No space left"):
            _ = offered.ticket
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_proc_the_file_has_a_name_until_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isdir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda p: p != "/proc/self/fd" and isdir(p))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = SharedFile(100)
    path = Path(file.ticket(b"").path)
    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    file.close()
    assert not list(tmp_path.iterdir())
    module = nn.Linear(3, 3)
    assert digest_of(through_file(module)) == digest_of(module)
    assert not list(tmp_path.iterdir())


# --- what cannot be sent -------------------------------------------------------------------------


def test_a_part_that_does_not_pickle_is_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    module[1][0].lock = threading.Lock()
    with pytest.raises(WeightsError, match=r"Sequential\.1\.0\.lock is a _thread\.lock"):
        weights.offer("auto", module)


def test_weights_without_data_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(WeightsError, match=r"2 of 4 weights .* '1\.weight' .*Load them first"):
        weights.offer("auto", module)


@pytest.mark.parametrize("source", [None, 3, nn.Linear(1, 1)])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="weights must be 'auto'"):
        weights.offer(source, nn.Linear(1, 1))


# --- the loader ----------------------------------------------------------------------------------


def test_a_loader_is_called_where_it_is_loaded() -> None:
    def loader() -> nn.Module:
        torch.manual_seed(5)
        return nn.Linear(3, 2)

    with weights.offer(loader, nn.Linear(3, 2)) as offered:
        assert weights.can_open(offered.ticket)
        assert list(offered.pieces()) == []
        copy = weights.load(offered.ticket)
    assert torch.equal(copy.weight, loader().weight)


def test_a_loader_must_return_a_module() -> None:
    with pytest.raises(WeightsError, match=r"loads the module returned a dict, not an nn\.Module"):
        through_file(nn.Linear(1, 1), lambda: {"weight": 1})


def test_a_loader_must_pickle() -> None:
    lock = threading.Lock()
    with pytest.raises(WeightsError, match=r"the loader\.lock is a _thread\.lock"):
        weights.offer(lambda: lock, nn.Linear(1, 1))


def test_a_loader_must_not_carry_the_weights() -> None:
    big = nn.Linear(5000, 5000)
    with pytest.raises(WeightsError, match="takes 95 MiB along"):
        weights.offer(lambda: big, nn.Linear(1, 1))


def test_a_loader_must_work_without_arguments() -> None:
    with pytest.raises(ConfigError, match=r"without arguments.*path"):
        weights.offer(lambda path: nn.Linear(1, 1), nn.Linear(1, 1))


# --- what ranks can import ahead -----------------------------------------------------------------


def test_an_offer_names_the_code_that_it_needs() -> None:
    module = nn.Sequential(Zoo(), nn.Linear(1, 1))
    names = weights.offer("memory", module).imports
    assert names[0] == "torch.nn.modules.container"
    assert {Zoo.__module__, "torch.nn.modules.linear"} <= set(names)
    assert len(set(names)) == len(names)


def test_code_that_travels_by_value_is_not_imported() -> None:
    package = sys.modules[Zoo.__module__.rpartition(".")[0]]
    cloudpickle.register_pickle_by_value(package)
    try:
        assert Zoo.__module__ not in weights.offer("memory", Zoo()).imports
    finally:
        cloudpickle.unregister_pickle_by_value(package)
    Here = type("Here", (nn.Linear,), {"__module__": "__main__"})
    assert weights.offer("memory", Here(1, 1)).imports == ()
