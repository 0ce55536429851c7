"""A step of your own on each rank: here, a clock in every block.

    python examples/extra.py

`PrepareConfig(extra=...)` takes a function of the module and the rank's `RankInfo`. Each rank runs
it once, before the module is split, so it can do whatever works on a module: put in an attention
kernel, another package's layers, or, as here, hooks. It must do the same on every rank.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

import raymod
from raymod.demo import load_pipeline


def clocks(module: nn.Module, info: raymod.RankInfo) -> nn.Module:
    """Sum up the seconds that each kind of block takes on this rank."""
    seconds: dict[str, float] = defaultdict(float)
    began: dict[int, float] = {}

    def start(block: nn.Module, args: Any) -> None:
        began[id(block)] = time.perf_counter()

    def stop(block: nn.Module, args: Any, output: Any, *, kind: str) -> None:
        if info.device.startswith("cuda"):
            torch.cuda.synchronize(info.device)
        seconds[kind] += time.perf_counter() - began.pop(id(block))

    for kind, blocks in module.named_children():
        for block in blocks if isinstance(blocks, nn.ModuleList) else []:
            block.register_forward_pre_hook(start)
            block.register_forward_hook(functools.partial(stop, kind=kind))
    module.clocks = seconds  # type: ignore[assignment]
    return module


def read(worker: Any) -> dict[str, float]:
    """On a rank: what its clocks say."""
    return dict(worker.module.clocks)


def main() -> None:
    pipe = load_pipeline()
    raymod.wrap(pipe, ulysses_degree=2, prepare=raymod.PrepareConfig(extra=clocks))
    pipe(
        "a handwritten seven",
        height=32,
        width=32,
        num_inference_steps=8,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
    )
    for rank, seconds in enumerate(pipe.transformer.gang.call_all(read)):
        each = ", ".join(f"{kind} {1000 * value:.0f} ms" for kind, value in seconds.items())
        print(f"rank {rank}: {each}")
    raymod.unwrap(pipe)


if __name__ == "__main__":
    main()
