"""Compiled ranks, and the order in which ranks are prepared."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.prepare import prepare
from tests import models
from tests.parallel import plain
from tests.parallel.test_sequence import World


def run(degrees: dict[str, int], backend: str, cache: bool = False) -> dict[str, Any]:
    """Four calls to a compiled module on a rank; the largest difference, and what was compiled."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    module, make_inputs = models.flux()
    local = copy.deepcopy(module)
    ready = prepare(
        module,
        degrees=Degrees(**degrees),
        parallel=ParallelConfig(**degrees),
        prepare=PrepareConfig(threads=1, compile={"backend": backend}),
        device=torch.device("cpu"),
    )
    worst, graphs = 0.0, []
    for seed in range(4):
        call = make_inputs(2, seed=seed)
        with torch.no_grad():
            whole = local(**call)[0]
        share = ready((), call)
        graphs.append(counters["stats"]["unique_graphs"])
        if share.replies and share.join is None:
            worst = max(worst, float((share.output[0] - whole).abs().max()))
    return {"worst": worst, "graphs": graphs, "split": ready.report.split}


@pytest.mark.parametrize("axis", ["ulysses_degree", "ring_degree"])
@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_and_split(ranks: World, backend: str, axis: str) -> None:  # R106
    for seen in ranks(2)(run, {axis: 2}, backend):
        assert seen["worst"] <= 1e-5
        assert seen["graphs"][0] >= 1
        assert len(set(seen["graphs"][1:])) == 1  # nothing is compiled from step to step
        assert f"3 blocks compiled by {backend}" in seen["split"]


def steps(module: nn.Module, info: Any) -> nn.Module:
    assert info == "the rank"
    assert module.marks == ["backend"]
    module.marks.append("extra")
    return module


class Marked(nn.Linear):
    """Notes in what order it is prepared."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.marks: list[str] = []

    def set_attention_backend(self, name: str) -> None:
        self.marks.append("backend")

    def enable_cache(self, config: Any) -> None:
        self.marks.append("cache")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append("compile")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.marks.append("warm up")
        return super().forward(x)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_ranks_that_compile_keep_apart_what_they_keep(ranks: World, tmp_path: Path) -> None:
    """R104, R105: in one folder: new, with one rank's entries spoiled, and gone."""
    for number in range(3):
        for difference in ranks(2)(inductor, str(tmp_path)):
            assert difference <= 1e-5
        folders = sorted(path.name for path in tmp_path.iterdir())
        assert folders == ["raymod-rank-0", "raymod-rank-1"]
        graphs = [p for p in (tmp_path / "raymod-rank-1" / "fxgraph").rglob("*") if p.is_file()]
        assert graphs
        if number == 0:
            for path in graphs:
                path.write_bytes(b"spoiled")
        elif number == 1:
            shutil.rmtree(tmp_path / "raymod-rank-1")


def inductor(folder: str) -> float:
    """The largest difference between a compiled, divided module and the plain one."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    try:
        module = plain.Denoiser()
        local = copy.deepcopy(module)
        degrees = {"batch_degree": 2}
        ready = prepare(
            module,
            degrees=Degrees(**degrees),
            parallel=ParallelConfig(**degrees),
            prepare=PrepareConfig(threads=1, compile=True),
            device=torch.device("cpu"),
        )
        call = {"x": torch.ones(2, 5, 8), "time": torch.rand(2)}
        with torch.no_grad():
            whole = local(**call)
        share = ready((), call)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        first = dist.get_rank()
        return float((share.output - whole[first : first + 1]).abs().max())
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def test_the_order() -> None:  # R108
    module = Marked()
    prepare(
        module,
        degrees=Degrees(),
        parallel=ParallelConfig(workers=1),
        prepare=PrepareConfig(
            threads=1,
            attention_backend="native",
            extra=steps,
            cache=object(),
            compile=True,
            warm_up={"x": torch.ones(1, 4)},
        ),
        device=torch.device("cpu"),
        rank_info="the rank",
    )
    assert module.marks == ["backend", "extra", "cache", "compile", "warm up"]
