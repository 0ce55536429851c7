"""How much memory and disk there is for a copy of the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from raymod.machine import cgroups

__all__ = ["available_disk_bytes", "available_memory_bytes"]


def available_memory_bytes() -> int:
    """Memory in bytes that this process can still take without swapping or being killed."""
    limits = [_meminfo_available(), *_cgroup_rooms()]
    return max(0, min(limits))


def available_disk_bytes(folder: str) -> int:
    """Free disk in bytes under `folder`; none where it is kept in memory or does not exist."""
    if not Path(folder).is_dir() or _file_system(folder) in ("tmpfs", "ramfs", "ramdisk"):
        return 0
    return shutil.disk_usage(folder).free


def _meminfo_available() -> int:
    for line in cgroups.lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _cgroup_rooms() -> list[int]:
    """What is left under each limit that holds for this process."""
    rooms = []
    for version, folder in cgroups.folders("memory"):
        if version == 2:
            rooms += _room(folder, "memory.max", "memory.current")
        else:
            rooms += _room(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return rooms


def _room(folder: Path, limit_name: str, usage_name: str) -> list[int]:
    limit, usage = cgroups.lines(folder / limit_name), cgroups.lines(folder / usage_name)
    if not limit or not usage or not limit[0].isdigit():  # "max" is no limit
        return []
    cached = sum(
        int(line.split()[1])
        for line in cgroups.lines(folder / "memory.stat")
        if line.startswith(("inactive_file ", "total_inactive_file "))
    )
    return [int(limit[0]) - int(usage[0]) + cached]


def _file_system(folder: str) -> str:
    """Type of the file system that holds `folder`, or "" where that is not known."""
    target = Path(folder).resolve()
    found, kind = Path("/"), ""
    for line in cgroups.lines(Path("/proc/mounts")):
        mount, mounted_kind = line.split()[1:3]
        point = Path(mount.replace("\\040", " "))
        if (point == target or point in target.parents) and len(point.parts) >= len(found.parts):
            found, kind = point, mounted_kind
    return kind
