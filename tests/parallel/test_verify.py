"""A split that does not reproduce the model is noticed, on all ranks, before it is used."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from raymod.parallel import judge
from raymod.parallel.kinds import kind_of
from raymod.parallel.verify import LIMIT, LIMIT_8_BIT, LIMIT_16_BIT, difference, limit_for
from tests import models
from tests.parallel import cases, plain, plants
from tests.parallel.cases import Seen, largest_difference, whole_output
from tests.parallel.plants import AFTER, BEFORE, Change
from tests.parallel.ranks import RankFailedError, Ranks
from tests.parallel.test_batch import assert_exact, of_family, of_module
from tests.parallel.test_sequence import World

SEQUENCE = {"ulysses_degree": 2}
BATCH = {"batch_degree": 2}

PLANTED = [(name, plant, "change") for name in BEFORE for plant in BEFORE[name]]
PLANTED += [(name, plant, "late_change") for name in AFTER for plant in AFTER[name]]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


def assert_refused(seen: tuple[Seen, ...], start: str = "SplitError: ") -> None:
    for one in seen:
        assert one.error.startswith(start)
        assert "does not reproduce its own output" in one.error
        assert "verify" not in one.error


@pytest.mark.parametrize(("name", "plant", "when"), PLANTED, ids=name_of)
def test_a_planted_fault_is_noticed(ranks: World, name: str, plant: Change, when: str) -> None:
    asked: tuple[Seen, ...]
    (asked,) = of_family(ranks(2), name, {}, [{"batch": 1}], SEQUENCE, **{when: plant})
    assert_refused(asked)
    assert all("Use batch_degree=2, or workers=2" in one.error for one in asked)

    calls = [{"batch": 1}, {"batch": 1}, {"batch": 2}]
    options = {"asked": {"workers": 2}, when: plant}
    first, second, third = of_family(ranks(2), name, {}, calls, SEQUENCE, **options)
    assert_exact(first, [True, False])
    assert_exact(second, [True, False])
    assert_exact(third, [True, True])  # by batch then
    assert "is not split by sequence" in first[0].warnings[0]
    assert "runs whole on every rank" in first[0].warnings[0]
    assert second[0].warnings == ()
    assert "it is split by batch instead" in third[0].warnings[0]


def test_a_fault_that_only_a_mask_shows(ranks: World) -> None:
    calls = [{"batch": 1, "mask": mask} for mask in ("ones", "padded", "ones")]
    options = {"late_change": plants.mask_forgotten}
    first, second, third = of_family(ranks(2), "qwenimage", {}, calls, SEQUENCE, **options)
    assert_exact(first, [True, False])
    assert_refused(second)
    assert_exact(third, [True, False])


def test_the_difference_is_said(ranks: World) -> None:
    options = {"change": plants.text_left_whole}
    (seen,) = of_family(ranks(2), "flux", {}, [{"batch": 1}], SEQUENCE, **options)
    assert "output[0] differs by 0." in seen[0].error
    assert "where 1e-04 is allowed" in seen[0].error
    assert seen[0].error == seen[1].error


def test_without_a_check_a_fault_passes(ranks: World) -> None:
    """So that it is the check that notices the others."""
    options = {"change": plants.text_left_whole, "verify": False}
    (seen,) = of_family(ranks(2), "flux", {}, [{"batch": 1}], SEQUENCE, **options)
    assert seen[0].error == ""
    assert largest_difference(seen[0].whole, whole_output(seen)) > 1e-3


def test_random_numbers_are_the_same_on_all_ranks(ranks: World) -> None:
    call = {"x": torch.ones(4, 50)}
    noisy = plain.Noisy().train()
    (asked,) = of_module(ranks(2), noisy, [call], BATCH)
    assert_refused(asked)  # a part draws other numbers than the whole
    for seen in of_module(ranks(2), noisy, [call, call], BATCH, asked={"workers": 2}):
        assert_exact(seen, [True, False])


@pytest.mark.parametrize("asked", [None, {"workers": 2}])
def test_what_is_no_number_without_a_split_is_not_the_split_s_fault(
    ranks: World, asked: Any
) -> None:
    good, bad = {"x": torch.ones(4, 5)}, {"x": torch.full((4, 5), -1.0)}
    results = of_module(ranks(2), plain.Root(), [bad, bad, good], BATCH, asked=asked)
    for seen in results[:2]:
        assert [one.error for one in seen] == ["", ""]
        assert [one.replies for one in seen] == [True, False]
        assert bool(whole_output(seen).isnan().all())
    (warning,) = results[0][0].warnings
    assert "Root itself puts out nothing but NaN or infinity, without any split" in warning
    assert results[1][0].warnings == ()
    assert_exact(results[2], [True, True])  # checked, and split, once there is something to see
    assert results[2][0].runs == 2


def test_numbers_that_are_not_finite_in_places_are_compared_there(ranks: World) -> None:
    x = torch.ones(4, 5)
    x[:, 1] = -1
    (seen,) = of_module(ranks(2), plain.Root(), [{"x": x}], BATCH)
    assert [one.error for one in seen] == ["", ""]
    assert torch.equal(whole_output(seen).isnan(), x < 0)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-9])
def test_small_outputs_are_compared_by_their_own_size(ranks: World, scale: float) -> None:
    x = torch.randn(4, 50)
    (wrong,) = of_module(ranks(2), plain.Centred(scale), [{"x": x}], BATCH)
    assert_refused(wrong)
    (exact,) = of_module(ranks(2), plain.Scaled(scale), [{"x": x}], BATCH)
    assert_exact(exact, [True, True])


def test_objects_that_only_have_an_address_are_compared_by_what_they_hold(ranks: World) -> None:
    x = torch.randn(4, 5)
    (same,) = of_module(ranks(2), plain.WithObjects(), [{"x": x}], BATCH)
    assert [one.error for one in same] == ["", ""]
    assert [one.replies for one in same] == [True, True]
    (other,) = of_module(ranks(2), plain.WithObjects(), [{"x": x, "inside": True}], BATCH)
    assert_refused(other)  # a tensor in it has the batch, and nobody puts its parts together


@pytest.mark.parametrize("degrees", [SEQUENCE, BATCH])
def test_a_module_in_16_bit_with_parts_in_fp32(ranks: World, degrees: Any) -> None:
    options = {"dtype": torch.bfloat16, "change": plants.keep_in_fp32}
    (seen,) = of_family(ranks(2), "wan", {}, [{"batch": 2}], degrees, **options)
    assert [one.error for one in seen] == ["", ""]
    assert whole_output(seen)[0].dtype is torch.bfloat16
    assert largest_difference(seen[0].whole, whole_output(seen)) < LIMIT_16_BIT
    (wrong,) = of_family(
        ranks(2),
        "wan",
        {},
        [{"batch": 2}],
        SEQUENCE,
        late_change=plants.one_attention_left_out,
        **options,
    )
    assert_refused(wrong)


@pytest.mark.parametrize("how", ["norm", "in_place", "anew"])
def test_what_a_call_changes_in_the_module_is_the_same_on_all_ranks(ranks: World, how: str) -> None:
    """In training mode, where the mean and variance of a part are not those of the batch."""
    module = plain.Counting(how).train()
    calls = [{"x": torch.randn(4, 5)} for _ in range(3)]
    workers = {"asked": {"workers": 2}}
    for errors, found, right in ranks(2)(cases.buffers_after, module, calls, BATCH, **workers):
        assert errors == ["", "", ""]
        for name, value in right.items():
            torch.testing.assert_close(found[name], value)
    (chosen, *_) = of_module(ranks(2), module, calls, BATCH, **workers)
    assert chosen[0].replies
    assert "changes the module's own seen" in chosen[0].warnings[0]
    (asked, *_) = of_module(ranks(2), module, calls, BATCH)
    assert_refused(asked)
    assert "call eval()" in asked[0].error
    (evaluated, *_) = of_module(ranks(2), module.eval(), calls, BATCH)
    assert_exact(evaluated, [True, True])


def test_what_a_module_only_caches_is_no_change(ranks: World) -> None:
    (seen,) = of_module(ranks(2), plain.Caching(), [{"x": torch.randn(4, 5)}], BATCH)
    assert_exact(seen, [True, True])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("whole", "split", "value"),
    [
        ([1e-3, 2e-3], [1e-3, 2.1e-3], 0.05),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-9], INF),
        ([1.0, NAN, INF, -INF], [1.5, NAN, INF, -INF], 0.5),
        ([1.0, NAN], [1.0, INF], INF),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
    ],
)
def test_the_measure(whole: list[float], split: list[float], value: float) -> None:
    found = difference(torch.tensor(whole), torch.tensor(split))
    assert found.value == pytest.approx(value, rel=1e-3)
    complex_ = [
        torch.complex(torch.tensor(part), torch.zeros(len(part))) for part in (whole, split)
    ]
    assert difference(*complex_).value == pytest.approx(value, rel=1e-3)


def test_a_mere_rounding_beside_a_large_output_is_nothing() -> None:
    large = torch.tensor([1.0, -1.0])
    assert difference((large, torch.tensor(1e-9)), (large, torch.tensor(-1e-9))).value < LIMIT
    assert difference((large, torch.tensor(1e-2)), (large, torch.tensor(2e-2))).value > LIMIT


def test_arrays_and_what_holds_itself() -> None:
    assert difference(np.ones(3), np.ones(3)).value == 0
    assert difference(np.ones(3), np.zeros(3)).value == 1
    assert difference(plain.Endless(), plain.Endless()).value == 0


def test_one_rank_fails_and_all_know(ranks: World) -> None:
    x = torch.ones(4, 3)
    x[3] = 9
    (asked,) = of_module(ranks(2), plain.Uneven(), [{"x": x}], BATCH)
    assert_refused(asked)
    assert all("ArithmeticError: too large" in one.error for one in asked)
    (chosen,) = of_module(ranks(2), plain.Uneven(), [{"x": x}], BATCH, asked={"workers": 2})
    assert_exact(chosen, [True, False])


def test_one_rank_fails_in_the_middle_of_an_exchange() -> None:
    """Its own error comes out of it at once, although the other waits for it elsewhere."""
    assert judge.MIN_PATIENCE_AFTER_ERROR_S <= 10
    pair = Ranks(2, timeout_s=8)
    try:
        (seen,) = list(zip(*pair(cases.impatient, plants.fails_on_rank_one), strict=True))
    except RankFailedError as error:
        pytest.fail(str(error))
    finally:
        pair.close()
    assert seen[1].startswith("ArithmeticError: only here")
    assert seen[0]


def test_the_model_s_own_error_is_its_own(ranks: World) -> None:
    calls = [{"x": torch.ones(2, 3, 9), "time": torch.ones(2)}]
    (seen,) = of_module(ranks(2), plain.Denoiser(), calls, BATCH)
    assert all(one.error.startswith("RuntimeError: mat1 and mat2 shapes") for one in seen)


def test_no_memory_for_the_check(ranks: World) -> None:
    calls = [{"x": torch.ones(4, 3)}]
    (seen,) = of_module(ranks(2), plain.Large(), calls, BATCH)
    assert all("runs whole on every rank" in one.error for one in seen)
    assert all("tried to allocate a lot" in one.error for one in seen)
    (seen,) = of_module(ranks(2), plain.Large(), calls, BATCH, verify=False)
    assert torch.equal(whole_output(seen), torch.full((4, 3), 2.0))


def test_numbers_of_8_bits(ranks: World) -> None:
    x = torch.randn(4, 5).to(torch.float8_e4m3fn)
    (seen,) = of_module(ranks(2), plain.Eighths(), [{"x": x}], BATCH)
    assert [(one.error, one.replies, one.warnings) for one in seen] == [("", True, ())] * 2
    assert torch.equal(whole_output(seen).float(), seen[0].whole.float())


def test_numbers_of_few_bits_are_compared() -> None:
    two, three = (torch.full((4,), n).to(torch.float8_e5m2) for n in (2.0, 3.0))
    assert difference(two, two).value == 0
    assert difference(two, three).value == pytest.approx(1 / 2)
    assert limit_for(torch.nn.Identity(), two) == LIMIT_8_BIT < 1 / 3
    pairs = [torch.full((4,), n, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for n in (2, 3)]
    assert difference(pairs[0], pairs[0]).value == 0
    assert difference(*pairs).value == INF


def test_a_call_in_autocast_is_another_kind() -> None:
    x = torch.randn(2, 5)
    kind = functools.partial(kind_of, ((x,), {}), (), by_batch=True)
    assert limit_for(torch.nn.Identity(), x) == LIMIT
    before = kind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert limit_for(torch.nn.Identity(), x) == LIMIT_16_BIT
        assert kind() != before
    assert kind() == before


def test_an_output_that_is_still_on_its_way_is_waited_for(ranks: World) -> None:
    first, other = ranks(2)(cases.pending)
    assert other is None
    assert first[0] == "Tensor"
    assert torch.equal(first[1], torch.full((1, 5), 2.0))


@pytest.mark.parametrize("values", [range(1000, 1024), [float(n) for n in range(24)]])
def test_a_number_that_changes_every_step(ranks: World, values: Any) -> None:
    """Plain integers may be sizes, and are checked anew; but not for ever."""
    calls = [{"x": torch.ones(2, 3), "step": value} for value in values]
    results = of_module(ranks(2), plain.Step(), calls, BATCH)
    for seen in results:
        assert_exact(seen, [True, True])
    checked = [seen[0].runs == 2 for seen in results]
    assert checked == [True] * sum(checked) + [False] * (24 - sum(checked))
    assert sum(checked) == (8 if isinstance(values, range) else 1)


def test_forget_checks_again(ranks: World) -> None:
    for runs in ranks(2)(cases.runs_after_forget):
        assert runs == [2, 1, 2, 1]


def test_a_module_that_is_changed_while_split_is_split_anew(ranks: World) -> None:
    """Where a layer that the plan gathers at is wrapped, the gather goes on to the wrapper."""
    first, second = ranks(2)(cases.changed_while_split)
    for (output, expected, tokens), (_, _, others) in zip(first, second, strict=True):
        assert cases.largest_difference(expected, output[0]) <= 1e-5
        assert (tokens, others) == (18, 17)


@pytest.mark.parametrize("name", models.FAMILIES)
def test_another_model_in_the_process_is_left_alone(ranks: World, name: str) -> None:
    for before, after in ranks(2)(cases.neighbour, name):
        assert torch.equal(before, after)
