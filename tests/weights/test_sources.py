"""One suite for every weight source: what two ranks get, and what they cannot do to one another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raymod import weights
from tests.weights import ranks
from tests.weights.ranks import Rank, digest_of, tensors_of
from tests.weights.small import DTYPE, Small, load_plainly, save, small

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")

Ranks = tuple[Rank, Rank]
Open = Callable[[Path], weights.Offer]


def _memory(folder: Path) -> weights.Offer:
    return weights.offer("memory", small())


def _auto(folder: Path) -> weights.Offer:
    from safetensors.torch import load_file

    module = small()
    state = load_file(save(module, folder) / "diffusion_pytorch_model.safetensors")
    module.load_state_dict(state, assign=True, strict=False)
    module.last.weight = module.first.weight
    offered = weights.offer("auto", module)
    assert offered.ticket.needs, "nothing was found to be mapped"
    return offered


def _folder(folder: Path) -> weights.Offer:
    return weights.offer(save(small(), folder), small())


def _file(folder: Path) -> weights.Offer:
    return weights.offer(
        str(save(small(), folder) / "diffusion_pytorch_model.safetensors"), small()
    )


def _shards(folder: Path) -> weights.Offer:
    return weights.offer(save(small(), folder, sharded=True), small())


def _noted(folder: Path) -> weights.Offer:
    module = small()
    module.register_to_config(_name_or_path=str(save(module, folder)))
    return weights.offer("checkpoint", module)


def _cast(folder: Path) -> weights.Offer:
    """From a checkpoint in another dtype; all values of bf16 are values of fp32."""
    return weights.offer(save(small().float(), folder), small())


def _loader(folder: Path) -> weights.Offer:
    path = str(save(small(), folder))
    return weights.offer(lambda: load_plainly(path), small())


def _pretrained(folder: Path) -> weights.Offer:
    path = save(small(), folder)
    return weights.read_pretrained(path, cls=Small, torch_dtype=DTYPE).offer


SOURCES = [_memory, _auto, _folder, _file, _shards, _noted, _cast, _loader, _pretrained]


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__.strip("_"))
def offered(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[weights.Offer]:
    with request.param(tmp_path / "model") as made:
        yield made


def test_both_ranks_get_the_module(two_ranks: Ranks, offered: weights.Offer) -> None:
    module, x = small(), torch.randn(3, 8, dtype=DTYPE)
    for rank in two_ranks:
        assert rank.do(ranks.load, offered.ticket) == digest_of(module)
        assert torch.equal(rank.do(ranks.call, x), module(x))
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(module).items()}
    assert set(dtypes.values()) == {DTYPE, torch.float32, torch.float64, torch.int64}


def test_tied_weights_stay_tied(two_ranks: Ranks, offered: weights.Offer) -> None:
    rank, _ = two_ranks
    rank.do(ranks.load, offered.ticket)
    assert rank.do(_edit_first) == [7.0, 7.0]


def test_no_rank_can_change_anothers(
    two_ranks: Ranks, offered: weights.Offer, tmp_path: Path
) -> None:
    one, other = two_ranks
    before, files = digest_of(small()), _content(tmp_path)
    for rank in two_ranks:
        rank.do(ranks.load, offered.ticket)
    one.do(ranks.edit)
    assert one.do(ranks.digest) != before
    assert other.do(ranks.digest) == before
    assert one.do(ranks.load, offered.ticket, "again") == before
    assert _content(tmp_path) == files


def test_what_was_loaded_stays_and_nothing_else(
    two_ranks: Ranks, offered: weights.Offer, tmp_path: Path
) -> None:
    rank, _ = two_ranks
    rank.do(ranks.load, offered.ticket)
    rank.do(ranks.drop)  # what a first load opens for good is open now
    files = rank.do(ranks.open_files)
    rank.do(ranks.load, offered.ticket)
    offered.close()
    for path in (tmp_path / "model").glob("*"):
        path.unlink()
    assert rank.do(ranks.digest) == digest_of(small())
    rank.do(ranks.drop)
    assert rank.do(ranks.open_files) == files


def test_the_driver_keeps_nothing_open(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for make in SOURCES:
        before = len(os.listdir("/proc/self/fd"))
        with make(tmp_path / make.__name__) as made:
            _ = made.ticket
        assert len(os.listdir("/proc/self/fd")) == before, make.__name__


def _edit_first() -> list[float]:
    module = ranks.HELD["module"]
    with torch.no_grad():
        module.first.weight[0, 0] = 7
    return [float(part.weight[0, 0]) for part in (module.first, module.last)]


def _content(folder: Path) -> dict[str, Any]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
