"""What a rank does to its module, in what order, and what it reports."""

from __future__ import annotations

import os

import pytest
from torch import nn

from raymod.config import Degrees
from tests.parallel import cases, plain
from tests.parallel.test_sequence import World


def widen(module: nn.Module, info: object) -> nn.Module:
    module.out = nn.Linear(8, 8)
    return module


def forget_to_return(module: nn.Module, info: object) -> None:
    widen(module, info)


@pytest.mark.parametrize("size", [2, 4])
def test_the_report_says_what_is_in_effect(ranks: World, size: int) -> None:  # R70, R87
    for report in ranks(size)(cases.report_of, "qwenimage", {"ulysses_degree": size}):
        assert report.degrees == Degrees(ulysses_degree=size)
        assert (report.hooks, report.attentions, report.threads) == (9, 2, 1)
        assert report.split == f"by sequence over {size} (9 cuts and gathers, 2 attentions)"
        assert report.warnings == ()


def test_without_a_plan_a_sequence_split_is_an_error(ranks: World) -> None:
    for _, error in ranks(2)(cases.prepared, plain.Denoiser(), {"ulysses_degree": 2}):
        assert error.startswith("ConfigError: ulysses_degree=2: Denoiser does not say where")
        assert "Use batch_degree=2" in error


def test_a_plan_that_matches_nothing_is_an_error(ranks: World) -> None:
    module = plain.Denoiser(plan={})
    for _, error in ranks(2)(cases.prepared, module, {"ulysses_degree": 2}):
        assert error.startswith("ConfigError: Denoiser._cp_plan matches nothing")


def test_the_world_must_fit_the_degrees(ranks: World) -> None:
    for _, error in ranks(2)(cases.prepared, plain.Denoiser(), {"batch_degree": 4}):
        assert "makes 4 ranks, but torch.distributed runs with 2" in error


def test_the_user_s_step_comes_before_the_split(ranks: World) -> None:
    module = plain.Denoiser()
    for report, error in ranks(1)(cases.prepared, module, {}, extra=widen):
        assert error == ""
        assert report.split == "one rank, no split"


def test_the_user_s_step_must_return_the_module(ranks: World) -> None:
    for _, error in ranks(1)(cases.prepared, plain.Denoiser(), {}, extra=forget_to_return):
        assert "prepare.extra must return the module, not NoneType" in error


def test_cores_are_shared_by_the_ranks_of_a_host(ranks: World) -> None:
    threads = ranks(2)(cases.threads)
    cores = len(os.sched_getaffinity(0))
    assert threads == [max(1, cores // 2)] * 2
