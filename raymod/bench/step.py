"""Time of one step of a Flux-like transformer, with and without raymod.

2048 image and 256 text tokens, width 512, 2 double and 4 single blocks, fp32. The module in this
process, with one thread and with as many threads as there are ranks; split over the ranks with one
thread each; and the same split in processes without Ray: alternating in one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from raymod.api import wrap
from raymod.bench import model
from raymod.bench.machine import ray_running, spread
from raymod.bench.spmd import spmd
from raymod.config import PrepareConfig

__all__ = ["bench_step"]

RANKS = 2
_STORE_BYTES = 128 << 20


def bench_step(*, quick: bool) -> dict[str, Any]:
    """The part `step`: seconds of each way, and how far raymod's output is from the local one."""
    image, text, blocks = ((8, 16), 16, 1) if quick else ((32, 64), 256, 4)
    module, inputs = model.small(blocks=blocks), model.inputs(image=image, text=text)
    with (
        torch.no_grad(),
        ray_running(_STORE_BYTES, cpus=RANKS),
        spmd(RANKS, image=image, text=text, blocks=blocks) as plain,
        wrap(module, workers=RANKS, prepare=PrepareConfig(threads=1)) as stub,
    ):
        ways: dict[str, Callable[[], float]] = {
            "local, 1 thread": lambda: _local(module, inputs, 1)[0],
            "local": lambda: _local(module, inputs, RANKS)[0],
            "spmd": plain,
            "raymod": lambda: _timed(lambda: stub(**inputs)[0])[0],
        }
        for way in ways.values():  # warm; the first split call is checked too
            way()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 if quick else 15):
            for name, way in ways.items():
                seconds[name].append(way())
        exact = _local(module, inputs, 1)[1]
        difference = (stub(**inputs)[0] - exact).abs().max() / exact.abs().max()
    found: dict[str, Any] = {name: spread(values) for name, values in seconds.items()}
    # of each round raymod against what ran just before it
    pairs = zip(seconds["raymod"], seconds["spmd"], strict=True)
    found["ratio"] = spread([one / other for one, other in pairs])
    found["difference"] = float(difference)
    return found


def _timed(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    output = call()
    return time.perf_counter() - began, output


def _local(module: nn.Module, inputs: dict[str, Any], threads: int) -> tuple[float, torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _timed(lambda: module(**inputs)[0])
    finally:
        torch.set_num_threads(before)
