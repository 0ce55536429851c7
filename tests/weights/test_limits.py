"""How much memory is there, told from the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymod.machine import cgroups
from raymod.weights import limits

MiB = 1 << 20


def fake(monkeypatch: pytest.MonkeyPatch, root: Path, cgroup: str, files: dict[str, str]) -> None:
    known = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1048576 kB\n"}
    known["/proc/self/cgroup"] = cgroup
    known |= {f"/cg/{name}": text for name, text in files.items()}
    monkeypatch.setattr(cgroups, "ROOT", Path("/cg"))
    monkeypatch.setattr(cgroups, "lines", lambda path: known.get(str(path), "").splitlines())


def test_no_limit_is_the_machines_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, tmp_path, "0::/\n", {"memory.max": "max\n", "memory.current": "5\n"})
    assert limits.available_memory_bytes() == 1024 * MiB


def test_the_tightest_of_nested_limits_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "a/memory.max": f"{500 * MiB}",
        "a/memory.current": f"{450 * MiB}",
        "a/memory.stat": f"anon 1\ninactive_file {20 * MiB}",  # can be dropped
        "a/b/memory.max": f"{300 * MiB}",
        "a/b/memory.current": f"{100 * MiB}",
    }
    fake(monkeypatch, tmp_path, "0::/a/b\n", files)
    assert limits.available_memory_bytes() == 70 * MiB


def test_version_1_is_read_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{400 * MiB}",
        "memory/memory.usage_in_bytes": f"{100 * MiB}",
    }
    fake(monkeypatch, tmp_path, "4:memory:/host/only\n3:cpu:/\n", files)
    assert limits.available_memory_bytes() == 300 * MiB


def test_an_exceeded_limit_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, tmp_path, "0::/\n", {"memory.max": "5", "memory.current": "9"})
    assert limits.available_memory_bytes() == 0


def test_this_machine_has_some() -> None:
    assert limits.available_memory_bytes() > 64 * MiB


def test_memory_is_no_disk(tmp_path: Path) -> None:
    assert limits.available_disk_bytes(str(tmp_path)) > 0
    assert limits.available_disk_bytes("/no/such/folder") == 0
    if Path("/dev/shm").is_dir():
        assert limits.available_disk_bytes("/dev/shm") == 0
