"""The shipped pipeline, loaded once, and the examples' own measuring code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raymod.demo import load_pipeline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "digits"


@pytest.fixture(scope="session")
def pipe() -> Any:
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def evaluate() -> Iterator[ModuleType]:
    """`examples/digits/evaluate.py` as a module."""
    pytest.importorskip("sklearn")
    sys.path.insert(0, str(EXAMPLES))
    try:
        import evaluate

        yield evaluate
    finally:
        sys.path.remove(str(EXAMPLES))
