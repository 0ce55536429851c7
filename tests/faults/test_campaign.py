"""A few runs of the campaign, one for each end that a run may come to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.imports import ROOT


@pytest.mark.gang
def test_faults_end_exact_or_with_a_name() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.campaign", "--only", "7,8,9,11"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    *runs, ends = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert [line.split(": ")[1].split()[0] for line in runs if " ranks  " in line] == [
        "recovered",
        "refused",
        "survived",
        "refused",
    ]
    assert ends.startswith("survived 1 / recovered 1 / refused 2 / lost 0 in ")
