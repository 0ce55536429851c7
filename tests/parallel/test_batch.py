"""The batch split is exact, whatever carries the batch; what cannot be divided is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import models
from tests.parallel import cases, plain
from tests.parallel.cases import Seen, largest_difference, whole_output
from tests.parallel.plants import cut, gather
from tests.parallel.ranks import Ranks
from tests.parallel.test_sequence import EXACT, World

TWO = {"batch_degree": 2}
BOTH = {"batch_degree": 2, "ulysses_degree": 2}


def of_family(ranks: Ranks, *args: Any, **options: Any) -> list[tuple[Seen, ...]]:
    return list(zip(*ranks(cases.family, *args, **options), strict=True))


def of_module(
    ranks: Ranks, module: nn.Module, calls: list[dict[str, Any]], degrees: Any, **options: Any
) -> list[tuple[Seen, ...]]:
    return list(zip(*ranks(cases.watch, module, calls, degrees, **options), strict=True))


def assert_exact(seen: tuple[Seen, ...], replies: list[bool]) -> None:
    assert [one.error for one in seen] == [""] * len(seen)
    assert [one.replies for one in seen] == replies
    assert largest_difference(seen[0].whole, whole_output(seen)) <= EXACT


@pytest.mark.parametrize("name", models.FAMILIES)
def test_families(ranks: World, name: str) -> None:
    calls = [{"batch": 3}, {"batch": 2}, {"batch": 2, "return_dict": True}]
    results = of_family(ranks(2), name, {}, calls, TWO)
    for seen in results:
        assert_exact(seen, [True, True])
        assert seen[0].warnings == ()
    # Whole and part in the check; the part alone in a second call of the kind.
    assert [one.runs for one in results[0]] == [2, 2]
    assert [one.runs for one in results[1]] == [1, 1]


@pytest.mark.parametrize("name", models.FAMILIES)
def test_with_a_sequence_split(ranks: World, name: str) -> None:
    calls = [{"batch": 2}, {"batch": 3}, {"batch": 1}]
    results = of_family(ranks(4), name, {}, calls, BOTH)
    for seen in results[:2]:
        assert_exact(seen, [True, False, True, False])
        assert seen[0].warnings == ()
    assert_exact(results[2], [True, False, False, False])
    (warning,) = results[2][0].warnings
    assert warning.startswith("batch_degree=2: a call with a batch of 1 cannot be divided")
    assert results[2][1].warnings == ()


def test_fewer_samples_than_groups(ranks: World) -> None:
    calls = [{"batch": 2}, {"batch": 2}, {"batch": 4}]
    results = of_family(ranks(4), "flux", {}, calls, {"batch_degree": 4})
    for seen in results[:2]:
        assert_exact(seen, [True, True, False, False])
    assert_exact(results[2], [True] * 4)
    assert [bool(seen[0].warnings) for seen in results] == [True, False, False]
    assert "leaves some of them idle" in results[0][0].warnings[0]


def test_a_batch_of_one_is_said_once(ranks: World) -> None:
    results = of_family(ranks(2), "wan", {}, [{"batch": 1}, {"batch": 1}], TWO)
    for seen in results:
        assert_exact(seen, [True, False])
        assert [one.runs for one in seen] == [1, 1]
    assert [len(seen[0].warnings) for seen in results] == [1, 0]


@pytest.mark.parametrize("image", [(1, 2), (2, 1)])
def test_as_many_tokens_as_samples(ranks: World, image: tuple[int, int]) -> None:
    """Flux's ids have no batch, but look as if they had."""
    calls = [{"batch": 2, "image": image, "text": text} for text in (11, 2)]
    for seen in of_family(ranks(2), "flux", {}, calls, TWO):
        assert_exact(seen, [True, True])


def test_positions_without_a_batch(ranks: World) -> None:
    calls = [{"x": torch.randn(b, 3, 4), "positions": torch.arange(3.0)} for b in (3, 2, 3)]
    results = of_module(ranks(2), plain.Positions(), calls, TWO)
    for seen in results:
        assert_exact(seen, [True, True])
    assert results[2][0].runs == 1


@pytest.mark.parametrize("sizes", [(2, 3, 5), (3, 5, 2)])
def test_lists_with_a_tensor_a_sample(ranks: World, sizes: tuple[int, ...]) -> None:
    def call(batch: int) -> dict[str, Any]:
        return {
            "x": [torch.randn(2 + sample, 6) for sample in range(batch)],
            "time": torch.rand(batch),
            "sizes": [(2 + sample, 3) for sample in range(batch)],
            "words": ["a" * sample for sample in range(batch)],
        }

    results = of_module(ranks(2), plain.Lists(), [call(batch) for batch in sizes], TWO)
    for seen in results:
        assert_exact_samples(seen)


def assert_exact_samples(seen: tuple[Seen, ...]) -> None:
    assert [one.error for one in seen] == ["", ""]
    whole, other = seen[0].whole, whole_output(seen)
    assert isinstance(other, plain.Samples)
    assert other.note == "done"
    assert len(other.samples) == len(whole.samples)
    for one, two in zip([*whole.samples, whole.mean], [*other.samples, other.mean], strict=True):
        torch.testing.assert_close(two, one)


@pytest.mark.parametrize("batch", [3, 2, 5])
def test_a_residual_a_layer(ranks: World, batch: int) -> None:
    """With three samples the lists of three layers look like lists of samples."""
    call = {
        "x": torch.randn(batch, 4, 5),
        "residuals": [torch.randn(batch, 4, 5) for _ in range(3)],
        "scales": [0.5, 1.0, 2.0],
        "shape": (1, 2, 3),
    }
    (seen,) = of_module(ranks(2), plain.Residuals(), [call], TWO)
    assert [one.error for one in seen] == ["", ""]
    whole, other = seen[0].whole, whole_output(seen)
    assert list(other) == ["x", "both", "shape", "none"]
    assert (other["shape"], other["none"]) == ((1, 2, 3), None)
    for one, two in zip((whole["x"], *whole["both"]), (other["x"], *other["both"]), strict=True):
        torch.testing.assert_close(two, one)


@pytest.mark.parametrize("time", [torch.rand(3), torch.rand(1), torch.tensor(0.5)])
def test_a_plain_module(ranks: World, time: torch.Tensor) -> None:
    calls = [{"x": torch.randn(3, 7, 8), "time": time}]
    (seen,) = of_module(ranks(2), plain.Denoiser(), calls, TWO, asked={"workers": 2})
    assert_exact(seen, [True, True])
    assert "has no _cp_plan" in seen[0].report.warnings[0]


def test_a_module_with_a_plan_of_its_own(ranks: World) -> None:
    calls = [{"x": torch.randn(batch, 7, 8), "time": torch.rand(batch)} for batch in (1, 2)]
    for seen in of_module(ranks(2), plain.Dispatching(), calls, {"ulysses_degree": 2}):
        assert_exact(seen, [True, False])
        assert (seen[0].report.hooks, seen[0].report.attentions) == (2, 1)


def test_a_plan_without_attention_that_a_split_reaches(ranks: World) -> None:
    """torch's own attention sees this rank's tokens only: the check notices."""
    module = plain.Denoiser(plan={"": {"x": cut(1)}, "out": gather(1)})
    calls = [{"x": torch.randn(2, 7, 8), "time": torch.rand(2)}]
    (seen,) = of_module(ranks(2), module, calls, {"ulysses_degree": 2})
    assert all("does not reproduce its own output" in one.error for one in seen)


def test_positional_arguments(ranks: World) -> None:
    for share, whole in ranks(2)(cases.positional, TWO):
        assert share.replies
        assert share.output.shape[0] < whole.shape[0]


def test_samples_that_mix_are_not_divided(ranks: World) -> None:
    call = {"x": torch.randn(4, 3)}
    (asked,) = of_module(ranks(2), plain.Mixing(), [call], TWO)
    assert all(one.error.startswith("SplitError: Mixing split by batch_degree=2") for one in asked)
    chosen = of_module(ranks(2), plain.Mixing(), [call, call], TWO, asked={"workers": 2})
    for seen in chosen:
        assert_exact(seen, [True, False])
    (warning,) = chosen[0][0].warnings
    assert "Mixing is not split by batch" in warning
    assert "runs whole on every rank" in warning
    assert chosen[1][0].warnings == ()


def test_the_check_leaves_the_arguments_alone(ranks: World) -> None:
    call = {"x": torch.randn(4, 3), "extra": {"scale": torch.randn(4, 1)}}
    for (x, names), *_ in zip(ranks(2)(cases.arguments_after, plain.Popping(), call, TWO)):
        assert torch.equal(x, call["x"])
        assert names == ["scale"]


def test_without_a_check(ranks: World) -> None:
    calls = [{"batch": 3}, {"batch": 2, "return_dict": True}]
    for seen in of_family(ranks(2), "qwenimage", {}, calls, TWO, verify=False):
        assert_exact(seen, [True, True])
        assert [one.runs for one in seen] == [1, 1]
