"""What is installed from a wheel has all that it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import raymod
from tests.house.imports import PACKAGE, ROOT

LIMIT_BYTES = 6_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "raymod", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, source], check=True, timeout=120)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    files = (p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert {path.relative_to(ROOT).as_posix() for path in files} - held == set()
    assert "raymod/demo/model/model_index.json" in held


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= LIMIT_BYTES


def test_the_wheel_names_the_command_and_its_version(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "raymod = raymod.cli:main" in archive.read(info).decode()
    assert wheel.name == f"raymod-{raymod.__version__}-py3-none-any.whl"
