"""Thousands of calls with changing shapes and prompts: memory stays flat.

    python -m tests.faults.soak --calls 5000

Each call has another size of picture and length of prompt, out of a few dozen, other numbers, and
now and then a batch of two. Every hundredth output is compared with the plain model's. Memory is
that of driver and ranks (private bytes), the median over each tenth of the run. Exits with 1 if the
last tenth holds more than 5 % beyond the third, or if an output is off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict

import psutil
import torch

import raymod
from tests import models
from tests.api.test_pipelines import difference

TOLERANCE = 1e-5
GROWTH = 0.05


def soak(calls: int, *, seed: int = 0) -> bool:
    """Whether all is well after that many calls; prints what it sees."""
    module, make_inputs = models.flux()
    plain = models.flux()[0].eval()
    chance = random.Random(seed)
    held: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(10)])
    worst = 0.0
    with torch.no_grad(), raymod.wrap(module.eval(), ulysses_degree=2) as stub:
        processes = {"driver": psutil.Process()}
        for info in stub.report.ranks:
            processes[f"rank {info.rank}"] = psutil.Process(info.pid)
        began = time.monotonic()
        for number in range(calls):
            call = make_inputs(
                1 + (number % 10 == 0),
                image=(chance.randint(2, 8), chance.randint(2, 8)),
                text=chance.randint(3, 20),
                seed=number,
            )
            output = stub(**call)[0]
            if number % 100 == 0:
                worst = max(worst, difference(output, plain(**call)[0]))
            if number % 20 == 0:
                for name, process in processes.items():
                    held[name][10 * number // calls].append(process.memory_full_info().uss / 2**20)
        seconds = time.monotonic() - began
    print(
        f"{calls} calls in {seconds:.0f} s, largest difference {worst:.1e}; private MiB by tenth:"
    )
    well = worst <= TOLERANCE
    for name, tenths in held.items():
        medians = [statistics.median(tenth) for tenth in tenths]
        grown = medians[-1] / medians[2] - 1
        well &= grown <= GROWTH
        told = " ".join(f"{median:.0f}" for median in medians)
        print(f"  {name}: {told} ({100 * grown:+.1f} % from the third to the last)")
    return well


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    return 0 if soak(asked.calls, seed=asked.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
