"""The parts of the demo that need no ranks; `raymod demo` itself is tested with the commands."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raymod.demo import run
from raymod.errors import ConfigError


def test_a_run_can_be_repeated_exactly(pipe: Any) -> None:
    first, times_ms = run._make_digits(pipe, 3)
    again, _ = run._make_digits(pipe, 3)
    assert first.shape == (10, 32, 32, 3)
    assert first.dtype == np.float32
    assert run.max_difference(first, again) == 0.0
    assert len(times_ms) == 3
    assert min(times_ms) > 0


def test_the_difference_is_the_largest_one() -> None:
    first = np.zeros((2, 3))
    second = first.copy()
    second[1, 2] = -0.25
    assert run.max_difference(first, second) == 0.25


def test_a_pixel_that_is_no_number_is_not_equal() -> None:
    broken = np.zeros((2, 3))
    broken[0, 0] = np.nan
    assert math.isnan(run.max_difference(np.zeros((2, 3)), broken))


def test_pictures_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(1, 3\)"):
        run.max_difference(np.zeros((2, 3)), np.zeros((1, 3)))


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        run.run_demo(steps=0, output=tmp_path / "demo.png")


def test_a_missing_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*missing"):
        run.run_demo(output=tmp_path / "missing" / "demo.png")
    assert list(tmp_path.iterdir()) == []
