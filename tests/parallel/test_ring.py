"""A ring is exact, alone and with Ulysses and batch, and checked like any split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raymod.parallel import kernels
from tests import models
from tests.parallel import plants
from tests.parallel.test_sequence import (
    ODD,
    ODD_VIDEO,
    World,
    assert_exact,
    largest_difference,
    run,
    whole_output,
)
from tests.parallel.test_verify import assert_refused, name_of

RING = {"ring_degree": 2}
DEGREES = {
    "ring 2": RING,
    "ring 3": {"ring_degree": 3},
    "2 x 2": {"ring_degree": 2, "ulysses_degree": 2},
}
PLANTED = [
    ("flux", plants.text_left_whole, "change"),
    ("flux", plants.positions_left_whole, "change"),
    ("wan", plants.rope_left_whole, "change"),
    ("flux", plants.all_attentions_left_out, "late_change"),
    ("qwenimage", plants.one_attention_left_out, "late_change"),
]


def size_of(degrees: dict[str, int]) -> int:
    size = 1
    for degree in degrees.values():
        size *= degree
    return size


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("name", models.FAMILIES)
def test_families(ranks: World, name: str, heads: int, degrees: dict[str, int]) -> None:  # R80, R84
    odd = ODD_VIDEO if name == "ltx" else {} if name == "wan" else ODD
    calls: list[dict[str, Any]] = [{"batch": 1}, {"batch": 2, "return_dict": True, **odd}]
    config = {"num_attention_heads": heads}
    watched = models.ATTENTIONS[name]
    results = run(ranks(size_of(degrees)), name, config, calls, degrees=degrees, watched=watched)
    for seen in results:
        assert_exact(seen)
    whole, part = results[0][0].tokens
    assert part < whole == sum(one.tokens[1] for one in results[0])
    assert "in a ring" in results[0][0].report.split


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
@pytest.mark.parametrize("name", ["qwenimage", "ltx"])
def test_a_mask(ranks: World, name: str, degrees: dict[str, int]) -> None:  # R86
    calls = [{"batch": 2, "mask": mask} for mask in ("padded", "ones")]
    for seen in run(ranks(size_of(degrees)), name, {}, calls, degrees=degrees):
        assert_exact(seen)


def test_keys_that_every_rank_has(ranks: World) -> None:
    """Text and image of a Wan are not cut: its cross attention stays on each rank."""
    calls = [{"batch": 2, "video": (3, 6, 6)}]
    for seen in run(ranks(2), "wan", {"image_conditioned": True}, calls, degrees=RING):
        assert_exact(seen)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_sixteen_bit(ranks: World, name: str) -> None:
    for seen in run(ranks(2), name, {}, [{"batch": 2}], degrees=RING, dtype=torch.bfloat16):
        assert_exact(seen, limit=3e-2)


def test_with_a_batch(ranks: World) -> None:
    degrees = {"batch_degree": 2, "ring_degree": 2}
    (seen,) = run(ranks(4), "flux", {}, [{"batch": 3}], degrees=degrees)
    assert [one.error for one in seen] == [""] * 4
    assert [one.replies for one in seen] == [True, False, True, False]
    assert largest_difference(seen[0].whole, whole_output(seen)) <= 1e-5


@pytest.mark.parametrize(("name", "plant", "when"), PLANTED, ids=name_of)
def test_a_planted_fault_is_noticed(ranks: World, name: str, plant: Any, when: str) -> None:
    (seen,) = run(ranks(2), name, {}, [{"batch": 1}], degrees=RING, **{when: plant})
    assert_refused(seen)
    assert all("split by ring_degree=2" in one.error for one in seen)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "one row"])
@pytest.mark.parametrize("backend", ["native", "_native_math"])
def test_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch, backend: str, mask: str | None) -> None:
    monkeypatch.setattr(kernels, "MAX_SCORES", 2 * 6 * 7 * 3)  # three queries at a time
    query, key, value = torch.randn(2, 6, 7, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    seen = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    if mask == "causal":
        seen = seen.tril()
    elif mask is not None:
        seen = torch.rand(2, 1, 7 if mask == "bool" else 1, 7) > 0.5
        seen[:, :, 0] = False  # a query that sees nothing
    given = seen if mask in ("bool", "one row") else None
    options = {"mask": given, "is_causal": mask == "causal", "scale": 0.3, "backend": backend}
    output, lse = kernels.attend(query, key, value, **options)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    scores = scores.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    weights = scores.softmax(-1).nan_to_num(0)
    torch.testing.assert_close(output, weights @ value.repeat_interleave(2, 1))


def test_fewer_tokens_than_ranks_are_refused(ranks: World) -> None:
    degrees = DEGREES["2 x 2"]
    (seen,) = run(ranks(4), "flux", {}, [{"batch": 1, "text": 3}], degrees=degrees)
    for one in seen:
        assert one.error.startswith("TooFewTokensError: encoder_hidden_states has 3 tokens")
        assert "fewer than the 4 ranks of ring_degree=2 x ulysses_degree=2" in one.error
