"""The examples run as they stand, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.imports import ROOT

pytestmark = pytest.mark.gang


def run(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_step_of_ones_own_on_each_rank(tmp_path: Path) -> None:
    lines = run("extra.py", tmp_path).splitlines()
    times = r"transformer_blocks [1-9]\d* ms, single_transformer_blocks [1-9]\d* ms"
    assert [bool(re.fullmatch(f"rank {n}: {times}", line)) for n, line in enumerate(lines)] == [
        True,
        True,
    ], lines
