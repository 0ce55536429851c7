"""Attention over the tokens of all ranks equals attention on one, or is refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from raymod.errors import UnsupportedError
from raymod.parallel.masks import layout, mask_numbers
from tests.parallel.attention_cases import Case, attention
from tests.parallel.test_sequence import World

SAME = Case(queries=17, keys=17)
CASES = {
    "odd tokens": Case(),
    "uneven heads": Case(heads=7),
    "too uneven heads": Case(heads=3),
    "one head": Case(heads=1),
    "grouped": Case(heads=8, key_heads=4),
    "unevenly grouped": Case(heads=14, key_heads=7),
    "few groups": Case(heads=6, key_heads=3),
    "one key head": Case(heads=4, key_heads=1),
    "another value dim": Case(value_dim=5, backend="_native_math"),
    "sixteen bit": Case(dtype=torch.bfloat16),
    "double": Case(dtype=torch.float64),
    "causal": dataclasses.replace(SAME, causal=True),
    "causal with few heads": dataclasses.replace(SAME, causal=True, heads=1),
    "causal and grouped": dataclasses.replace(SAME, causal=True, heads=8, key_heads=4),
    "own keys": Case(mask="b11k"),
    "all keys": Case(mask="b11K"),
    "own keys a head": Case(mask="bh1k"),
    "own keys a head, uneven": Case(mask="bh1k", heads=7, additive=True),
    "own keys, few heads": Case(mask="bh1k", heads=1),
    "own keys, gathered": Case(mask="bh1k", heads=3, additive=True),
    "all keys, gathered": Case(mask="bh1K", heads=3),
    "square": Case(mask="bhQK"),
    "square, gathered": Case(mask="b1QK", heads=3),
    "square for all samples": Case(mask="11QK", additive=True),
    "own rows": Case(mask="bhqK"),
    "own rows, gathered": Case(mask="b1qK", heads=3),
    "own columns": Case(mask="bhQk"),
    "own columns, gathered": Case(mask="b1Qk", heads=3),
    "rows": Case(mask="b1Q1"),
    "own rows only": Case(mask="b1q1", additive=True),
    "a mask a head": Case(mask="1h11", additive=True),
    "two dims": Case(mask="bk"),
    "two dims, all keys": Case(mask="bK"),
    "two dims, rows": Case(mask="QK"),
    "two dims, own rows": Case(mask="qK"),
    "three dims": Case(mask="1QK"),
    "parts hidden": Case(mask="b1QK", whole_parts=True),
    "parts hidden, own rows": Case(mask="b1qK", whole_parts=True),
    "parts hidden, own keys": Case(mask="b11k", whole_parts=True),
    "parts hidden by infinity": Case(mask="b1QK", whole_parts=True, hidden=-torch.inf),
    "parts hidden by the least number": Case(
        mask="b1QK", whole_parts=True, hidden=torch.finfo(torch.float32).min
    ),
    "parts hidden by the least number, few heads": Case(
        heads=3, mask="bhQK", whole_parts=True, hidden=torch.finfo(torch.float32).min
    ),
    "parts hidden in sixteen bit": Case(
        mask="b1QK",
        whole_parts=True,
        hidden=torch.finfo(torch.bfloat16).min,
        dtype=torch.bfloat16,
    ),
    "as many keys as ranks": Case(queries=6, keys=4, mask="b11k"),
    "a batch of one": Case(batch=1, mask="bk"),
}


# Ranks, and how many parts the ring has that they make; 1: no ring.
SPLITS = {"2": (2, 1), "4": (4, 1), "ring 2": (2, 2), "ring 3": (3, 3), "ring 4": (4, 4)}
SPLITS["2 x 2"] = (4, 2)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact(ranks: World, case: Case, split: str) -> None:
    size, ring = SPLITS[split]
    limit = 3e-2 if case.dtype == torch.bfloat16 else 2e-6
    for difference, error in ranks(size)(attention, case, ring):
        assert error == ""
        assert difference <= limit


REFUSED = {
    "causal over two streams": (dataclasses.replace(SAME, causal=True, cut=False), "causal"),
    "causal across": (Case(causal=True), "causal"),
    "own rows and columns": (Case(mask="b1qk"), "lacks what lies between"),
    "three dims": (Case(mask="hQK"), "can mean several things"),
    "one dim": (Case(mask="k"), "can mean several things"),
    "a backend's second result": (Case(kwargs=(("return_lse", True),)), "return_lse"),
}


@pytest.mark.parametrize(("case", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_on_every_rank(ranks: World, case: Case, text: str) -> None:
    for _, error in ranks(2)(attention, case):
        assert error.startswith("UnsupportedError")
        assert text in error


REFUSED_IN_A_RING = {
    "causal over two streams": REFUSED["causal over two streams"],
    "own rows and columns": REFUSED["own rows and columns"],
    "a backend without it": (Case(backend="flash"), "needs the log-sum-exp"),
    "dropout": (Case(kwargs=(("dropout_p", 0.1),)), "has no dropout"),
    "a backend's second result": REFUSED["a backend's second result"],
}


@pytest.mark.parametrize(("case", "text"), REFUSED_IN_A_RING.values(), ids=REFUSED_IN_A_RING)
def test_refused_in_a_ring(ranks: World, case: Case, text: str) -> None:
    for _, error in ranks(2)(attention, case, 2):
        assert error.startswith("UnsupportedError")
        assert text in error


def test_a_mask_that_fits_neither_reading_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="fit neither"):
        layout([(4, 1, 9), (4, 1, 9)], batch=2, query_tokens=[5, 4], key_tokens=[8, 7])


def test_rows_that_may_be_samples_or_queries_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="one a sample or one a query"):
        layout([(2, 3, 7), (2, 3, 7)], batch=3, query_tokens=[3, 3], key_tokens=[4, 3])


def test_a_mask_on_some_ranks_only_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="only some ranks"):
        layout([(0, -1, -1), (4, 1, 7)], batch=2, query_tokens=[5, 4], key_tokens=[4, 3])


def test_a_mask_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="type BlockMask"):
        mask_numbers(type("BlockMask", (), {})())
