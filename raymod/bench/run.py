"""The benchmark as a whole: its parts, one after the other, and the files it writes."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raymod.bench import PARTS
from raymod.bench.figures import rows
from raymod.bench.machine import machine
from raymod.errors import ConfigError

__all__ = ["check_folder", "run_bench", "write_json"]

_MODULES = {"calls": "calls", "step": "step", "startup": "startup", "memory": "lasting"}


def run_bench(
    parts: Sequence[str] = PARTS,
    *,
    quick: bool = False,
    progress: Callable[[str], None] = lambda part: None,
) -> dict[str, Any]:
    """Measure, and hold what was measured against the figures.

    Args:
        parts: What to measure, out of `raymod.bench.PARTS`.
        quick: Few rounds of small sizes: whether it runs, not how fast.
        progress: Called with the name of each part before it is measured.

    Returns:
        What goes into `raymod-bench.json`: `machine`, `date`, `quick`, under each part's name its
        measurements, and `rows`, the table.

    Raises:
        ConfigError: There is no such part.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"there is no part {part!r}; the parts are {', '.join(PARTS)}")
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "quick": quick,
    }
    for part in [part for part in PARTS if part in parts]:
        progress(part)
        module = importlib.import_module(f"raymod.bench.{_MODULES[part]}")
        found[part] = getattr(module, f"bench_{part}")(quick=quick)
    found["rows"] = [
        {"part": row.part, "met": row.met, "value": row.value, "cells": row.cells()}
        for row in rows(found)
    ]
    return found


def check_folder(*files: Path) -> None:
    """Whether the files can be written, before anything is measured.

    Raises:
        ConfigError: The folder of one of them does not exist.
    """
    for file in files:
        folder = file.resolve().parent
        if not folder.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {folder}; make it first")


def write_json(found: dict[str, Any], file: Path) -> None:
    """Write what was measured.

    Args:
        found: What `run_bench` or `bench_pipeline` returned.
        file: Where to.
    """
    file.write_text(json.dumps(found, indent=1, default=str) + "\n")
