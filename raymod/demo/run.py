"""The demo itself: ten digits without raymod, the same ten with it, and how they compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import raymod
from raymod.demo import load_pipeline
from raymod.demo.pictures import draw_rows
from raymod.errors import ConfigError

__all__ = ["DIGITS", "DemoResult", "max_difference", "run_demo"]

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the demo measured; a step is one of all ten digits together.

    Args:
        ranks: One record a rank, in rank order: `rank`, `node_id`, `node_address`, `device`,
            `pid`.
        split: How the transformer was split.
        phases: Seconds by phase of `raymod.wrap`, in the order they happened.
        wrap_s: Seconds that `raymod.wrap` took as a whole.
        local_first_ms: First step of the plain pipeline, with the encoding of the prompts.
        local_ms: Median of its other steps.
        remote_first_ms: First step of the wrapped pipeline, likewise.
        remote_ms: Median of its other steps.
        max_difference: Largest absolute difference over all pixels, which go from 0 to 1; NaN
            if any pixel is.
        picture: The written png.
    """

    ranks: tuple[Any, ...]
    split: str
    phases: Mapping[str, float]
    wrap_s: float
    local_first_ms: float
    local_ms: float
    remote_first_ms: float
    remote_ms: float
    max_difference: float
    picture: Path


def run_demo(*, workers: int = 2, steps: int = 8, output: Path) -> DemoResult:
    """Make ten digits with the shipped pipeline, wrap it, make them again and compare.

    Args:
        workers: Ranks to split the transformer over.
        steps: Denoising steps.
        output: The png to write; its folder must exist.

    Returns:
        Where the ranks ran, times and the largest difference.

    Raises:
        ConfigError: `steps` is below 1, or the folder of `output` does not exist.
    """
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}")
    folder = output.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {output}: there is no folder {folder}; make it first")
    pipe: Any = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    plain, local = _make_digits(pipe, steps)
    started = time.perf_counter()
    with raymod.wrap(pipe, workers=workers) as stub:
        wrap_s = time.perf_counter() - started
        report = stub.report
        try:
            wrapped, remote = _make_digits(pipe, steps)
        finally:
            raymod.unwrap(pipe)
    difference = max_difference(plain, wrapped)
    draw_rows(
        [("plain diffusers", plain), (f"raymod, {_ranks(workers)}", wrapped)],
        columns=DIGITS,
        note=f'prompts "{_prompt("zero")}" to "{_prompt("nine")}", {steps} steps, the same seeds;'
        f" largest difference of a pixel {difference:.1e}",
    ).save(output)
    return DemoResult(
        ranks=tuple(report.ranks),
        split=report.split,
        phases=dict(report.phases),
        wrap_s=wrap_s,
        local_first_ms=local[0],
        local_ms=statistics.median(local[1:] or local),
        remote_first_ms=remote[0],
        remote_ms=statistics.median(remote[1:] or remote),
        max_difference=difference,
        picture=output,
    )


def max_difference(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Largest absolute difference; NaN where either holds one.

    Args:
        first: Any shape.
        second: The same shape.

    Raises:
        ValueError: The shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(f"pictures of shape {first.shape} and {second.shape} cannot be compared")
    return float(np.abs(first - second).max())


def _prompt(name: str) -> str:
    return f"a handwritten {name}"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _make_digits(pipe: Any, steps: int) -> tuple[NDArray[Any], list[float]]:
    """All ten digits in one batch, digit n from seed n.

    Returns:
        Pictures (10, 32, 32, 3) from 0 to 1, and the milliseconds of each step.
    """
    import torch

    ends = [time.perf_counter()]

    def note_end(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        ends.append(time.perf_counter())
        return {}

    pictures = pipe(
        [_prompt(name) for name in DIGITS],
        num_inference_steps=steps,
        max_sequence_length=16,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(DIGITS))],
        output_type="np",
        callback_on_step_end=note_end,
    ).images
    steps_ms = np.diff(ends) * 1000
    return pictures, [float(step_ms) for step_ms in steps_ms]
