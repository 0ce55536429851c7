"""The limits on this process, told from the kernel's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.machine import cgroups
from raymod.prepare import prepare


def fake(monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], cores: int) -> None:
    known = {"/proc/self/cgroup": cgroup} | {f"/cg/{name}": text for name, text in files.items()}
    monkeypatch.setattr(cgroups, "ROOT", Path("/cg"))
    monkeypatch.setattr(cgroups, "lines", lambda path: known.get(str(path), "").splitlines())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "250000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/the/host/s\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
        (
            "4:cpu,cpuacct:/a\n3:cpuset:/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n"}
            | {"cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_cores(
    monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], cores: float
) -> None:
    fake(monkeypatch, cgroup, files, 8)
    assert cgroups.available_cores() == cores


@pytest.mark.parametrize(("quota", "threads"), [("300000", 3), ("50000", 1)])
def test_a_rank_has_no_more_threads_than_its_container_allows(
    monkeypatch: pytest.MonkeyPatch, quota: str, threads: int
) -> None:
    fake(monkeypatch, "0::/\n", {"cpu.max": f"{quota} 100000\n"}, 8)
    before = torch.get_num_threads()
    try:
        ready = prepare(
            torch.nn.Identity(),
            degrees=Degrees(),
            parallel=ParallelConfig(),
            prepare=PrepareConfig(),
            device=torch.device("cpu"),
        )
        assert ready.report.threads == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_this_machine_has_some() -> None:
    assert 0 < cgroups.available_cores() <= (os.cpu_count() or 1)
