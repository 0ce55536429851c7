"""What the benchmarks need of the machine: a Ray, numbers from /proc, medians."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raymod.config import GangConfig

__all__ = ["MB", "cpu_s", "machine", "pss_mb", "ray_running", "spread", "status_kb"]

MB = 1_000_000


@contextmanager
def ray_running(store_bytes: int, *, cpus: int) -> Iterator[None]:
    """A Ray: the one that this process is connected to, a running one, or one for this block.

    Args:
        store_bytes: Size of the object store of one that is started here.
        cpus: What it has to give away: as many as there are actors at a time, whatever the cores;
            for each of them Ray starts a process beforehand.
    """
    from raymod.gang.session import attach, release

    config = GangConfig(ray_init={"num_cpus": cpus}, object_store_memory_bytes=store_bytes)
    session = attach(config)
    try:
        yield
    finally:
        release(session)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of some values, and how many there are."""
    several = list(values) if len(values) > 1 else [*values, *values]
    low, median, high = statistics.quantiles(several, n=4)
    return {"median": median, "quartiles": [low, high], "count": len(values)}


def status_kb(field: str, file: str = "status", pid: int | str = "self") -> int:
    """A field of one of the tables in `/proc/<pid>`, in KiB."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)


def pss_mb(*pids: int | str) -> float:
    """Memory of processes in MB, of what is shared each one's part."""
    return sum(status_kb("Pss", "smaps_rollup", pid) for pid in pids) * 1024 / MB


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """The class of this machine, and the versions that matter."""
    import diffusers
    import ray
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "gpus": gpus,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "ray": ray.__version__,
    }
