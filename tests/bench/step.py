"""Time of one step of a Flux-like transformer, with and without raymod.

    python -m tests.bench.step

2048 image and 256 text tokens, width 512, 2 double and 4 single blocks, fp32. The module in this
process, with one thread and with as many threads as there are ranks, and split over the ranks with
one thread each: alternating in one run, medians with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import raymod
from tests import models


def transformer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    module, make_inputs = models.flux(
        attention_head_dim=64,
        num_attention_heads=8,
        num_layers=2,
        num_single_layers=4,
        in_channels=64,
        joint_attention_dim=512,
        pooled_projection_dim=256,
        axes_dims_rope=(16, 24, 24),
    )
    return module.eval(), make_inputs(1, image=(32, 64), text=256)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def local(module: nn.Module, inputs: dict[str, torch.Tensor], threads: int) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output: torch.Tensor = module(**inputs)[0]
        return output
    finally:
        torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    module, inputs = transformer()
    prepare = raymod.PrepareConfig(threads=1)
    with torch.no_grad(), raymod.wrap(module, workers=options.workers, prepare=prepare) as stub:
        ways = {
            "local, 1 thread": lambda: local(module, inputs, 1),
            f"local, {options.workers} threads": lambda: local(module, inputs, options.workers),
            f"raymod, {options.workers} ranks of 1 thread": lambda: stub(**inputs)[0],
        }
        outputs = [call() for call in ways.values()]  # warm; the first split call is checked too
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeat):
            for name, call in ways.items():
                seconds[name].append(timed(call))
    scale = float(outputs[0].abs().max())
    base = statistics.median(seconds["local, 1 thread"])
    print(f"{'way':32}  {'median s':>8}  {'min':>6}  {'max':>6}  {'speed-up':>8}  {'max diff':>8}")
    for (name, values), output in zip(seconds.items(), outputs, strict=True):
        median = statistics.median(values)
        difference = float((output - outputs[0]).abs().max()) / scale
        print(
            f"{name:32}  {median:8.3f}  {min(values):6.3f}  {max(values):6.3f}  "
            f"{base / median:8.2f}  {difference:8.1e}"
        )


if __name__ == "__main__":
    main()
