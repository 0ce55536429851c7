"""Wrap and close, over and over in one process, and look at what stays behind.

    python -m tests.rounds.rounds --rounds 50

Each round wraps a small transformer over two ranks, calls it, compares, and closes. Afterwards
there must be no rank, placement group, shared-memory segment or temp file, no more threads and
open files than after the first rounds, and the driver's memory must have stopped growing. With
`--own-ray`, raymod also starts and stops Ray in each round. Exits with 1 if something stayed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import raymod
from tests import models

WARM_UP_ROUNDS = 2
GROWTH_BYTES = 24 << 20
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Look:
    """What there is of raymod's at one moment."""

    private_bytes: int
    threads: int
    files: int
    children: int
    leftovers: tuple[str, ...]


def look(before: frozenset[str]) -> Look:
    gc.collect()
    me = psutil.Process()
    memory = me.memory_full_info()
    return Look(
        private_bytes=memory.uss,
        threads=threading.active_count(),
        files=me.num_fds(),
        children=sum("RankActor" in _name(child) for child in me.children(recursive=True)),
        leftovers=tuple(sorted(traces() - before)),
    )


def traces() -> frozenset[str]:
    """Files of raymod's in shared memory and in the folders for temp files."""
    folders = {Path("/dev/shm"), Path(tempfile.gettempdir()), Path("/tmp")}
    return frozenset(str(p) for d in folders if d.is_dir() for p in d.glob("*raymod*"))


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def one_round() -> float:
    """The largest difference between the wrapped and the plain module."""
    module, make_inputs = models.flux()
    inputs = make_inputs(1)
    with torch.no_grad():
        expected = module.eval()(**inputs)[0]
        with raymod.wrap(module, workers=2) as stub:
            output = stub(**inputs)[0]
    return float((output - expected).abs().max() / expected.abs().max())


def groups() -> list[str]:
    import ray

    if not ray.is_initialized():
        return []
    table = ray.util.placement_group_table()
    return [key for key, value in table.items() if value["state"] != "REMOVED"]


def run(rounds: int) -> list[str]:
    """Run them, print a line now and then, and return what is wrong in the end."""
    before = traces()
    groups_before = set(groups())
    faults: list[str] = []
    first: Look | None = None
    now = start = look(before)
    for number in range(1, rounds + 1):
        difference = one_round()
        if not difference <= TOLERANCE:
            faults.append(f"round {number} differs by {difference:.2g}")
        if number % 10 == 0 or number in (WARM_UP_ROUNDS, rounds):
            now = look(before)
            first = first or now
            print(
                f"round {number:3}: {now.private_bytes >> 20} MiB, {now.threads} threads, "
                f"{now.files} files, {now.children} ranks, {len(now.leftovers)} leftovers, "
                f"difference {difference:.1e}",
                flush=True,
            )
    assert first is not None
    grown = now.private_bytes - first.private_bytes
    if grown > GROWTH_BYTES:
        faults.append(f"the driver grew by {grown >> 20} MiB after round {WARM_UP_ROUNDS}")
    if now.threads > first.threads:
        faults.append(f"threads: {first.threads}, then {now.threads}")
    if now.files > first.files + 4:
        faults.append(f"open files: {first.files}, then {now.files}")
    if now.children > start.children:  # a test's session may hold gangs of its own
        faults.append(f"{now.children - start.children} ranks are left")
    faults += [f"left behind: {name}" for name in now.leftovers]
    left = sorted(set(groups()) - groups_before)
    faults += [f"placement group {key} is left" for key in left]
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--own-ray", action="store_true", help="raymod starts Ray each time")
    options = parser.parse_args()
    if not options.own_ray:
        import ray

        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, logging_level="error"
        )
    faults = run(options.rounds)
    print("\n".join(faults) if faults else "nothing is left, nothing has grown")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
