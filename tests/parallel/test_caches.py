"""Step caches: a split model with one equals a local model with one, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel import caching
from tests.parallel.test_sequence import World

ULYSSES = {"ulysses_degree": 2}
BATCH = {"batch_degree": 2}
EVERYWHERE = ["first block", "magnitudes", "taylor lite", "pyramid", "faster distilled"]


def check(seen: list[dict[str, Any]], *, skips: bool = True) -> None:
    """The same outputs as locally, and the same steps skipped on every rank."""
    wholes = seen[0]["wholes"]
    for ours, theirs in zip(caching.joined(seen), wholes, strict=True):
        ours, theirs = ours[0], theirs[0]
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) <= 2e-6 * float(theirs.abs().max())
    for one in seen:
        # the first call of a kind is also checked
        assert one["counts"]["rank"][2:] == one["counts"]["local"][2:]
    if skips:
        local = seen[0]["counts"]["local"]
        assert min(local) < max(local)
        assert sum(local) > min(local) * len(local)


@pytest.mark.parametrize("config", EVERYWHERE)
def test_split_by_sequence(ranks: World, config: str) -> None:  # R96
    check(ranks(2)(caching.run, "flux", config, ULYSSES))
    check(ranks(2)(caching.run, "wan", config, ULYSSES))


@pytest.mark.parametrize("config", EVERYWHERE)
def test_divided_by_batch(ranks: World, config: str) -> None:
    check(ranks(2)(caching.run, "wan", config, BATCH, batch=3))


@pytest.mark.parametrize("config", ["first block", "pyramid"])
def test_both_ways(ranks: World, config: str) -> None:
    check(ranks(4)(caching.run, "wan", config, BATCH | ULYSSES, batch=3))


def test_features_that_are_predicted(ranks: World) -> None:
    check(ranks(2)(caching.run, "flux", "taylor", ULYSSES))


def test_frequencies_of_the_whole_latents(ranks: World) -> None:
    check(ranks(2)(caching.run, "wan", "faster", ULYSSES, batch=2, contexts=("both",)))
    check(ranks(2)(caching.run, "wan", "sea", ULYSSES))


@pytest.mark.parametrize("config", ["faster", "sea"])
def test_what_needs_the_whole_batch_is_not_divided(ranks: World, config: str) -> None:
    seen = ranks(2)(caching.run, "wan", config, BATCH, batch=2, contexts=("both",))
    check(seen)
    assert "so it is not divided by batch" in " ".join(seen[0]["warnings"])


def test_a_batch_that_leaves_groups_idle_is_not_divided(ranks: World) -> None:
    seen = ranks(4)(caching.run, "wan", "first block", {"batch_degree": 4}, batch=3)
    check(seen)
    assert "too small for 4 groups that decide together" in " ".join(seen[0]["warnings"])


def test_alone_ranks_decide_differently(ranks: World) -> None:
    """The fault that the common decision is there for."""
    seen = ranks(2)(
        caching.run, "wan", "first block", BATCH, batch=2, sabotage=caching.decide_alone
    )
    with pytest.raises(AssertionError):
        check(seen)


def test_a_cache_without_ranks(ranks: World) -> None:
    (seen,) = ranks(1)(caching.run, "flux", "first block", {})
    assert seen["counts"]["rank"] == seen["counts"]["local"]
    for (_, output, _), whole in zip(seen["shares"], seen["wholes"], strict=True):
        assert torch.equal(output[0], whole[0])
