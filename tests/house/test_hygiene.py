"""What must not stand in any file of the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Folders of one machine, and hosts of package registries, which differ from place to place.
PRIVATE = {
    "a path of one machine": re.compile(
        r"(?<![\w.\-/])/(home|root|Users|work|mnt|opt|srv|workspace)/[\w.]"
    ),
    "a registry's host": re.compile(r"\b(pypi|pythonhosted|npmjs|pytorch)\.(org|com)/(simple|whl)"),
}


def _tracked() -> list[Path]:
    run = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if run.returncode:
        pytest.skip("not a git checkout, so there is no list of the repository's files")
    return [ROOT / name for name in run.stdout.split("\0") if name]


def _findings(text: str) -> list[str]:
    return [
        f"line {number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in PRIVATE.items()
        if pattern.search(line)
    ]


def test_no_file_names_a_machine() -> None:
    found = {}
    for path in _tracked():
        try:
            lines = _findings(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; a file deleted but tracked
            continue
        if lines:
            found[path.relative_to(ROOT).as_posix()] = lines
    assert found == {}


@pytest.mark.parametrize("line", ["see /home" + "/ann/x", "'/root" + "/.cache'", "cd /work" + "/a"])
def test_a_machine_path_is_seen(line: str) -> None:
    assert len(_findings(line)) == 1


@pytest.mark.parametrize("line", ["https://example.org/home/x", "raymod/work/x.py", "/dev/shm"])
def test_other_paths_pass(line: str) -> None:
    assert _findings(line) == []
