"""The plan a module brings along, read as data."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from raymod.errors import ConfigError
from raymod.plans import Cut, Gather, resolve, sequence_plan
from tests import models


def cut(dim: Any, ndim: Any = None, of_output: bool = False) -> Any:
    """As diffusers' ContextParallelInput, which a module of one's own need not import."""
    return SimpleNamespace(split_dim=dim, expected_dims=ndim, split_output=of_output)


def gather(dim: Any) -> Any:
    return SimpleNamespace(gather_dim=dim)


def module(plan: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]))
    made._cp_plan = plan
    return made


@pytest.mark.parametrize("name", models.FAMILIES)
def test_families(name: str) -> None:
    plan = sequence_plan(models.FAMILIES[name](num_attention_heads=3)[0])
    assert plan is not None
    assert plan.heads == 3
    assert plan.source.endswith("._cp_plan")
    assert plan.gathers == (Gather(path="proj_out", dim=1),)
    assert {cut.dim for cut in plan.cuts} <= {0, 1}


def test_no_plan() -> None:
    assert sequence_plan(nn.Linear(2, 2)) is None
    assert sequence_plan(module(None)) is None


def test_a_plan_of_one_s_own() -> None:
    plan = sequence_plan(
        module(
            {
                "": {"input": cut(1, 3)},
                "0": {"input": [cut(0), cut(2, 4)], 1: cut(1, None, True)},
                "1.*": [None, gather(1)],
            }
        )
    )
    assert plan is not None
    assert plan.cuts == (
        Cut(path="", argument="input", dim=1, ndim=3),
        Cut(path="0", argument="input", element=0, dim=0),
        Cut(path="0", argument="input", element=1, dim=2, ndim=4),
        Cut(path="0", output=1, dim=1),
    )
    assert plan.gathers == (Gather(path="1.*", output=1, outputs=2, dim=1),)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ([], "must map module paths to cuts, not be list"),
        ({3: gather(1)}, "3 must be a module path"),
        ({"head": gather(1)}, "names 'head', but Sequential has no submodule 'head'"),
        ({"1.x": gather(1)}, "ModuleList has no submodule 'x'"),
        ({"": {"input": cut("1")}}, "split_dim='1'; split_dim must be an integer"),
        ({"": {"input": cut(1, True)}}, "expected_dims=True"),
        ({"": {"input": gather(1)}}, "has no split_dim"),
        ({"": cut(1)}, "has no gather_dim"),
        ({"": {"input": cut(1, None, True)}}, "by its name and split_output=False"),
        ({"": {0: cut(1)}}, "by its index and split_output=True"),
        ({"": {None: cut(1)}}, "is named by an argument or by an output's index"),
    ],
)
def test_a_malformed_plan_says_where(plan: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sequence_plan(module(plan))
    assert str(caught.value).startswith("Sequential._cp_plan")
    assert text in str(caught.value)


def test_paths() -> None:
    tree = module(None)
    assert resolve(tree, "") == [tree]
    assert resolve(tree, "1.*") == list(tree[1])
    assert resolve(tree, "1.0") == [tree[1][0]]
    assert resolve(tree, "1.7") == []  # a plan written for a deeper model


def test_reading_a_plan_starts_nothing() -> None:
    code = "import sys, raymod.plans; print({'ray', 'diffusers'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "set()")
