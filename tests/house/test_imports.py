"""The house: imports go one way, importing raymod does nothing, files stay small."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import raymod
from tests.house.imports import PACKAGE, ROOT, module_of, source_files, violations

MAX_LINES = 450
HEAVY = {"ray", "torch", "diffusers", "transformers", "numpy"}
PRINTERS = ("__main__", "cli", "demo", "bench")


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", source_files(), ids=_name)
def test_imports_only_from_lower_rows(path: Path) -> None:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert list(violations(path.read_text(), module=module_of(path), package=package)) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("errors", "import ray", "errors must not import ray"),
        ("errors", "from torch.distributed import TCPStore", "errors must not import torch"),
        ("config", "def f():\n    import torch.distributed as d", "config must not import torch.d"),
        ("config", "from torch import distributed", "config must not import torch.distributed"),
        ("calls", "from raymod.gang import Gang", "calls (row 1) imports gang (row 6)"),
        ("calls", "from raymod import gang", "calls (row 1) imports gang (row 6)"),
        ("calls", "from .gang import Gang", "calls (row 1) imports gang (row 6)"),
        ("calls", "from . import config", "calls (row 1) imports config (row 1)"),
        ("weights", "import raymod.transport", "weights (row 2) imports transport (row 2)"),
        ("module", "from raymod import wrap", "module (row 7) imports __init__ (row 9)"),
        ("worker", "import raymod", "worker (row 5) imports __init__ (row 9)"),
        ("module", "import raymod.weights.files", "module must not import raymod.weights"),
        ("gang", "importlib.import_module('diffusers')", "gang must not import diffusers"),
        ("worker", "if TYPE_CHECKING:\n    import ray", "worker must not import ray"),
        ("shed", "import os", "shed has no room"),
        ("cli", "from raymod.worker import Worker", "cli must not import raymod.worker"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str, found: str) -> None:
    messages = list(violations(source, module=module, package="raymod"))
    assert any(found in message for message in messages), messages


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors", "import pickle"),
        ("config", "from raymod.errors import ConfigError"),
        ("config", "import raylib, torch.nn"),
        ("worker", "from raymod import __version__"),
        ("gang", "import ray\nfrom raymod.worker import Worker"),
        ("cli", "import raymod\nfrom raymod import wrap\nfrom raymod.demo import show"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert list(violations(source, module=module, package="raymod")) == []


def test_relative_imports_are_resolved_from_a_folder() -> None:
    source = "from ..gang import Gang\nfrom . import files"
    messages = list(violations(source, module="weights", package="raymod.weights"))
    assert messages == ["line 1: weights (row 2) imports gang (row 6)"]


def test_importing_raymod_does_nothing() -> None:
    code = f"import sys, raymod; print(*sorted({HEAVY} & sys.modules.keys()), end='')"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_public_names_are_sorted_and_resolve() -> None:
    assert raymod.__all__ == sorted(raymod.__all__)
    assert {name for name in raymod.__all__ if getattr(raymod, name, None) is None} == set()
    assert set(raymod.__all__) <= set(dir(raymod))


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'warp'"):
        _ = raymod.warp


@pytest.mark.parametrize("path", source_files(), ids=_name)
def test_a_module_has_what_it_promises(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", source_files(), ids=_name)
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: is there a concept in it that wants its own room?"


@pytest.mark.parametrize("path", source_files(), ids=_name)
def test_only_the_command_line_prints(path: Path) -> None:
    if module_of(path) in PRINTERS:
        return
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert [call.lineno for call in calls if getattr(call.func, "id", "") == "print"] == []
