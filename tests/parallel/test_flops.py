"""Each rank does its share of the work, and not much more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import cases
from tests.parallel.test_sequence import World

# Proportions of real models: many more tokens than the width of a tiny one.
FLUX = {"image": (24, 24), "text": 64}
VIDEO = {"video": (4, 12, 12), "text": 64}
CALLS: dict[str, dict[str, Any]] = {
    "flux": FLUX,
    "flux2": FLUX,
    "wan": {"video": (4, 24, 24), "text": 64},
    "qwenimage": FLUX,
    "ltx": VIDEO,
}


@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("name", CALLS)
def test_by_sequence(ranks: World, name: str, heads: int) -> None:
    config = {"num_attention_heads": heads}
    call = {"batch": 1, **CALLS[name]}
    for whole, own in ranks(2)(cases.flops, name, config, call, {"ulysses_degree": 2}):
        assert own <= 0.65 * whole


@pytest.mark.parametrize("name", CALLS)
def test_in_a_ring(ranks: World, name: str) -> None:
    call = {"batch": 1, **CALLS[name]}
    for whole, own in ranks(2)(cases.flops, name, {}, call, {"ring_degree": 2}):
        assert own <= 0.65 * whole


@pytest.mark.parametrize("name", CALLS)
def test_by_batch(ranks: World, name: str) -> None:
    shares = ranks(2)(cases.flops, name, {}, {"batch": 3}, {"batch_degree": 2})
    assert [own / whole for whole, own in shares] == pytest.approx([2 / 3, 1 / 3], rel=0.05)


@pytest.mark.parametrize("axis", ["ulysses_degree", "ring_degree"])
def test_by_both(ranks: World, axis: str) -> None:
    degrees = {"batch_degree": 2, axis: 2}
    for whole, own in ranks(4)(cases.flops, "flux", {}, {"batch": 2, **FLUX}, degrees):
        assert own <= 0.33 * whole
