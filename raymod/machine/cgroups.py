"""The limits that a container or a service manager sets on this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_cores", "folders", "lines"]

ROOT = Path("/sys/fs/cgroup")


def available_cores() -> float:
    """How many cores this process may keep busy: those it may run on, and the limit on its time."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    return min([cores, *_quotas()])


def folders(controller: str) -> Iterator[tuple[int, Path]]:
    """The groups whose limits hold for this process, each with its version of cgroups: 2 or 1.

    Args:
        controller: Of version 1: "memory", "cpu".
    """
    for line in lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, roots = 2, [ROOT, ROOT / "unified"]
        elif controller in controllers.split(","):
            version, roots = 1, [ROOT / controller, ROOT / controllers]
        else:
            continue
        for root in dict.fromkeys(roots):
            # in a container the path may be the host's; then only the root's own limit is seen
            found = [root]
            for part in path.strip("/").split("/"):
                found.append(found[-1] / part)
            for folder in dict.fromkeys(found):
                yield version, folder


def lines(path: Path) -> list[str]:
    """The lines of one of the kernel's files; none if there is no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _quotas() -> Iterator[float]:
    for version, folder in folders("cpu"):
        if version == 2:
            words = " ".join(lines(folder / "cpu.max")).split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [word for name in names for word in lines(folder / name)]
        # "max" and -1 are no limit
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            yield int(words[0]) / int(words[1])
