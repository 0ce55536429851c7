"""What `auto` leaves in its file: only what is certain to be there, byte for byte."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from raymod import weights
from raymod.weights.mapped import files_of, unmodified
from tests.weights import ranks
from tests.weights.ranks import Rank, digest_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not os.path.exists("/proc/self/pagemap"),
    reason="needs the kernel's account of pages",
)

WIDTH = 256  # a weight of 64 pages


def chain() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(chain().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def module(path: Path) -> nn.Sequential:
    """Mapped from the file, as diffusers loads it."""
    module = chain()
    module.load_state_dict(load_file(path), assign=True)
    return module


def names_of(module: nn.Module) -> list[str]:
    found = unmodified(module)
    return [name for name, tensor in module.named_parameters() if id(tensor) in found]


def test_what_was_mapped_stays_in_the_file(module: nn.Sequential, path: Path) -> None:
    assert names_of(module) == ["0.weight", "1.weight", "2.weight", "3.weight"]
    assert files_of(module) == [str(path)]
    with weights.offer("auto", module) as offered:
        assert offered.ticket.file.size < 20_000
        assert [file.path for file in offered.ticket.needs] == [str(path)]
        assert digest_of(weights.load(offered.ticket)) == digest_of(module)


def test_a_changed_weight_is_sent_and_the_others_are_not(module: nn.Sequential) -> None:
    with torch.no_grad():
        module[1].weight[100, 100] += 1
    # its neighbours share a page with it at most, and only what is certain is left out
    assert set(names_of(module)) <= {"0.weight", "2.weight", "3.weight"}
    assert "3.weight" in names_of(module)
    with weights.offer("auto", module) as offered:
        assert offered.ticket.file.size < 4 * module[1].weight.nbytes
        assert digest_of(weights.load(offered.ticket)) == digest_of(module)


def test_a_page_that_was_read_is_still_the_files(module: nn.Sequential) -> None:
    assert digest_of(module) == digest_of(chain())
    assert len(names_of(module)) == 4


def test_in_a_module_that_was_only_made_here_nothing_is_found() -> None:
    module = chain()
    assert unmodified(module) == {}
    assert files_of(module) == []
    with weights.offer("auto", module) as offered:
        assert offered.ticket.needs == ()
        assert digest_of(weights.load(offered.ticket)) == digest_of(module)


def test_a_cast_or_a_copy_is_not_the_file(module: nn.Sequential) -> None:
    assert unmodified(module.to(torch.bfloat16)) == {}


def test_another_file_under_the_path_is_not_it(module: nn.Sequential, path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    save_file({name: t + 1 for name, t in chain().state_dict().items()}, path)
    assert {stored.file.path for stored in unmodified(module).values()} == {str(moved)}
    path.replace(moved)
    assert unmodified(module) == {}  # the file has no name any more, so nobody else can open it
    save_file(chain().state_dict(), f"{moved} (deleted)")  # what the system calls it now
    assert unmodified(module) == {}


def test_a_mapping_that_writes_to_the_file_is_not_used(tmp_path: Path) -> None:
    values = np.memmap(tmp_path / "raw", np.float32, mode="w+", shape=(WIDTH, WIDTH))
    values[:] = 1
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = nn.Parameter(torch.from_numpy(values))
    assert unmodified(module) == {}


def test_ranks_that_cannot_map_the_file_get_the_tensors(
    two_ranks: tuple[Rank, Rank], module: nn.Sequential, path: Path
) -> None:
    rank, other = two_ranks
    with weights.offer("auto", module) as offered:
        ticket = offered.ticket
        assert rank.do(weights.can_open, ticket)
        os.utime(path)  # not the very same any more
        assert not rank.do(weights.can_open, ticket)
        rank.do(ranks.start_receiving, offered.ticket_for_pieces)
        for piece in offered.pieces(100_000):
            rank.do(ranks.receive, piece)
        own = rank.do(ranks.received)
        for each in (rank, other):
            assert each.do(weights.can_open, own)
            assert each.do(ranks.load, own) == digest_of(module)
        rank.do(ranks.stop_receiving)


def test_ranks_that_map_the_file_share_its_pages(
    two_ranks: tuple[Rank, Rank], tmp_path: Path
) -> None:
    size = 64 << 20
    save_file({"weight": torch.ones(4096, size // 4096 // 4)}, tmp_path / "big.safetensors")
    module = nn.Linear(size // 4096 // 4, 4096, bias=False)
    module.load_state_dict(load_file(tmp_path / "big.safetensors"), assign=True)
    with weights.offer("auto", module) as offered:
        before = [rank.do(ranks.memory_kib, "Pss") for rank in two_ranks]
        for rank in two_ranks:
            rank.do(ranks.load, offered.ticket)  # reads every page
        after = [rank.do(ranks.memory_kib, "Pss") for rank in two_ranks]
    grown = sum(after) - sum(before)
    assert grown < 1.2 * size / 1024  # two private copies would be twice as much
