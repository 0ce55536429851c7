"""Small gangs for the tests: modules that misbehave on request, and functions to run on ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ray.util import placement_group_table
from torch import nn

from raymod import weights
from raymod.config import Degrees, GangConfig, ParallelConfig
from raymod.gang import Gang


class Probe(nn.Module):
    """Sums its scalar input over all ranks, times a weight; does something bad before it, if asked.

    Its input has no batch and it has no plan, so each rank runs the whole call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(
        self, x: torch.Tensor, mode: str = "", *, rank: int = 1, seconds: float = 60.0
    ) -> Any:
        total = x.clone()
        dist.all_reduce(total)
        if mode and (rank == -1 or dist.get_rank() == rank):
            misbehave(mode, seconds)
        dist.all_reduce(total)
        return (lambda: 0, open(os.devnull)) if mode == "unpicklable" else total * self.weight


class Plain(nn.Module):
    """Adds one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def misbehave(mode: str, seconds: float) -> None:
    if mode == "raise":
        raise LookupError("the probe was asked to raise")
    if mode == "exit":
        os._exit(3)
    if mode == "sleep":
        time.sleep(seconds)


def start(
    module: nn.Module | None = None,
    *,
    ranks: int = 2,
    load: str | Callable[[], nn.Module] = "auto",
    progress: Callable[[str], None] | None = lambda phase: None,
    **config: Any,
) -> Gang:
    """A gang of `ranks`; keyword arguments are those of `GangConfig`."""
    config = {
        "start_timeout_s": 120.0,
        "call_timeout_s": 60.0,
        "close_timeout_s": 5.0,
        "max_restarts": 0,
    } | config
    with weights.offer(load, module if module is not None else Probe()) as offer:
        return Gang.start(
            degrees=Degrees(batch_degree=ranks),
            parallel=ParallelConfig(workers=ranks, batch_degree=ranks, verify=False),
            load=offer,
            config=GangConfig(**config),
            progress=progress,
            again=offer.again,
        )


def placement_groups() -> set[str]:
    """Those that hold or want resources."""
    return {k for k, v in placement_group_table().items() if v["state"] != "REMOVED"}


def pids(gang: Gang) -> list[int]:
    return [info.pid for info in gang.report.ranks]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(true: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -- to run on ranks ---------------------------------------------------------------------------


def environ(worker: Any, names: tuple[str, ...]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def nap(worker: Any, seconds: float, rank: int = -1) -> int:
    if rank in (-1, worker.rank):
        time.sleep(seconds)
    return int(worker.rank)


def who(worker: Any) -> int:
    return int(worker.rank)


def stop_here(worker: Any, mode: str, rank: int) -> None:
    if worker.rank == rank:
        misbehave(mode, 60.0)
