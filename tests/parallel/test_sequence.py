"""The sequence split is exact: five families, any numbers of tokens, heads and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import models
from tests.parallel import cases
from tests.parallel.cases import Seen, largest_difference, whole_output
from tests.parallel.ranks import Ranks

EXACT = 1e-5
World = Callable[[int], Ranks]

ODD = {"image": (3, 7), "text": 9}  # 21 and 9 tokens: neither divides by 2 or 4
ODD_VIDEO = {"video": (3, 3, 5), "text": 9}


def run(ranks: Ranks, *args: Any, **options: Any) -> list[tuple[Seen, ...]]:
    """What each rank saw of each call to a family: `[call][rank]`."""
    degrees = options.pop("degrees", {"ulysses_degree": ranks.size})
    results = ranks(cases.family, *args, degrees, **options)
    return list(zip(*results, strict=True))


def assert_exact(seen: tuple[Seen, ...], limit: float = EXACT) -> None:
    assert [one.error for one in seen] == [""] * len(seen)
    assert [one.replies for one in seen] == [True] + [False] * (len(seen) - 1)
    assert largest_difference(seen[0].whole, whole_output(seen)) <= limit
    assert seen[0].warnings == ()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("heads", [4, 3, 1])
@pytest.mark.parametrize("name", models.FAMILIES)
def test_families(ranks: World, name: str, heads: int, size: int) -> None:
    odd = ODD_VIDEO if name == "ltx" else {} if name == "wan" else ODD
    calls: list[dict[str, Any]] = [
        {"batch": 1},
        {"batch": 2, "return_dict": True},
        {"batch": 2, "return_dict": True, "seed": 5, **odd},
    ]
    watched = models.ATTENTIONS[name]
    results = run(ranks(size), name, {"num_attention_heads": heads}, calls, watched=watched)
    for seen in results:
        assert_exact(seen)
    if size > 1:
        # A check runs the model whole and split; plain integers, as QwenImage's img_shapes, make
        # another kind of call.
        assert [seen[0].runs for seen in results] == [2, 2, 2 if name == "qwenimage" else 1]
        whole, part = results[0][0].tokens
        assert sum(one.tokens[1] for one in results[0]) == whole
        assert part < whole
        assert results[0][0].report.hooks > 0
        assert results[0][0].report.attentions > 0


@pytest.mark.parametrize("size", [2, 4])
def test_wan_with_an_image(ranks: World, size: int) -> None:
    calls = [{"batch": 1, "video": (2, 6, 6)}, {"batch": 2, "video": (3, 6, 6)}]
    for seen in run(ranks(size), "wan", {"image_conditioned": True}, calls):
        assert_exact(seen)


def test_wan_with_a_timestep_for_each_token(ranks: World) -> None:
    for seen in run(ranks(2), "wan", {}, [{"batch": 2, "per_token_timestep": True}]):
        assert_exact(seen)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["qwenimage", "ltx"])
def test_a_mask_that_masks_comes_later(ranks: World, name: str, size: int) -> None:
    calls = [{"batch": 2, "mask": mask} for mask in ("ones", "padded", "ones", "padded")]
    results = run(ranks(size), name, {}, calls)
    for seen in results:
        assert_exact(seen)
    assert [seen[0].runs for seen in results] == [2, 2, 1, 1]


@pytest.mark.parametrize("name", models.FAMILIES)
def test_sixteen_bit(ranks: World, name: str) -> None:
    for seen in run(ranks(2), name, {}, [{"batch": 2}], dtype=torch.bfloat16):
        assert_exact(seen, limit=3e-2)
        assert whole_output(seen)[0].dtype == torch.bfloat16


def math_attention(module: Any) -> None:
    module.set_attention_backend("_native_math")


def test_any_attention_backend_is_exact(ranks: World) -> None:
    """diffusers computes wrongly with those that know nothing of context parallelism."""
    for seen in run(ranks(2), "flux", {}, [{"batch": 1}], change=math_attention):
        assert_exact(seen)


@pytest.mark.parametrize("text", [1, 3])
def test_fewer_tokens_than_ranks_are_refused(ranks: World, text: int) -> None:
    (seen,) = run(ranks(4), "flux", {}, [{"batch": 1, "text": text}])
    tokens = f"encoder_hidden_states has {text} token"
    assert all(one.error.startswith(f"TooFewTokensError: {tokens}") for one in seen)
    assert all("ulysses_degree=4" in one.error for one in seen)


def test_fewer_tokens_than_ranks_fall_back_where_raymod_chose(ranks: World) -> None:
    calls = [{"batch": 1, "text": text} for text in (11, 3, 11, 3)]
    degrees = {"ulysses_degree": 4}
    results = run(
        ranks(4), "flux", {}, calls, degrees=degrees, asked={"workers": 4}, watched="proj_out"
    )
    for seen in results:
        assert [one.error for one in seen] == [""] * 4
        assert largest_difference(seen[0].whole, whole_output(seen)) <= EXACT
    assert [seen[0].tokens for seen in results] == [[35, 9], [35], [9], [35]]
    assert [bool(seen[0].warnings) for seen in results] == [False, True, False, False]
    assert "has 3 tokens along dim 1" in results[1][0].warnings[0]


@pytest.mark.parametrize("size", [2, 4])
def test_without_a_check_nothing_runs_twice(ranks: World, size: int) -> None:
    results = run(ranks(size), "flux2", {}, [{"batch": 1}, {"batch": 2}], verify=False)
    for seen in results:
        assert_exact(seen)
        assert seen[0].runs == 1


def test_sizes_are_exchanged_once_for_calls_of_equal_sizes(ranks: World) -> None:
    """Whether they are known must never depend on a rank's own sizes."""
    for counts, differences in ranks(2)(cases.exchanges, limit_s=30):
        assert counts == [4, 4, 0, 0]  # three attentions and the gather
        assert max(differences) <= EXACT


def test_sizes_that_depend_on_values_are_an_error(ranks: World) -> None:
    for error in ranks(2)(cases.other_sizes_than_before):
        assert error.startswith("SplitError: exchange number 0 of this call has sizes (3,)")
        assert "Use batch_degree" in error
