"""The benchmark for a pipeline of the user's, on the machine and the GPUs that are there."""

from __future__ import annotations

import inspect
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from raymod.api import unwrap, wrap
from raymod.bench.machine import machine, pss_mb, spread
from raymod.errors import ConfigError

__all__ = ["bench_pipeline"]

PROMPT = "a photograph of a lighthouse in a storm"


def bench_pipeline(
    path: Path | str,
    *,
    workers: int | None = None,
    steps: int = 8,
    prompt: str = PROMPT,
    arguments: Mapping[str, Any] | None = None,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Time the steps of a diffusers pipeline without raymod and with it.

    The pipeline runs on the GPU where there is one, else on the CPU; twice each way, and only the
    second run counts. Its output is left as latents.

    Args:
        path: A folder or a name that diffusers loads.
        workers: Ranks, as for `raymod.wrap`.
        steps: Denoising steps of a run.
        prompt: The prompt.
        arguments: Further arguments of the pipeline's call: `height`, `num_frames`, ...
        dtype: Name of a torch dtype to load the pipeline with, or `"auto"`.

    Returns:
        What goes into `raymod-bench.json`: `machine`, `date`, `model`, `split`, `devices`, `phases`
        of the start, `wrap_s`, for `local` and `raymod` the spread of a step's milliseconds,
        `parts`: the medians of what `stub.last_call` said after each step, `memory_mb` of driver
        and ranks, and `difference` of the latents, largest over all, against the largest of them.

    Raises:
        ConfigError: There is no such pipeline, or it does not say when a
            step ends, or `steps` is below 2.
    """
    if steps < 2:
        raise ConfigError(f"steps must be at least 2, as the first is not timed; got {steps}")
    pipe = _load(path, dtype)
    given = {
        "prompt": prompt,
        "num_inference_steps": steps,
        "output_type": "latent",
        **(arguments or {}),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe.to(device)
    plain, local = _steps(pipe, given)
    if device != "cpu":
        pipe.transformer.to("cpu")  # its place on the GPU is a rank's now
    began = time.perf_counter()
    with wrap(pipe, workers=workers) as stub:
        wrap_s = time.perf_counter() - began
        reports: list[dict[str, float]] = []
        try:
            wrapped, remote = _steps(pipe, given, lambda: reports.append(asdict(stub.last_call)))
            report = stub.report
            near = [report.ranks[rank].pid for rank in report.near]
            memory = {"driver": pss_mb(os.getpid()), "ranks here": pss_mb(*near)}
        finally:
            unwrap(pipe)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "model": str(path),
        "split": report.split,
        "devices": [str(info.device) for info in report.ranks],
        "phases": dict(report.phases),
        "wrap_s": wrap_s,
        "local": spread(local),
        "raymod": spread(remote),
        "parts": {key: spread([each[key] for each in reports])["median"] for key in reports[0]},
        "memory_mb": memory,
        "difference": float((plain - wrapped).abs().max() / plain.abs().max()),
    }


def _load(path: Path | str, dtype: str) -> Any:
    from diffusers import DiffusionPipeline

    wanted = None if dtype == "auto" else getattr(torch, dtype, None)
    if dtype != "auto" and not isinstance(wanted, torch.dtype):
        raise ConfigError(f"torch has no dtype {dtype!r}; use bfloat16, float16 or float32")
    options = {"torch_dtype": wanted} if wanted else {}
    try:
        pipe: Any = DiffusionPipeline.from_pretrained(path, **options)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ConfigError(f"diffusers cannot load a pipeline from {path}: {error}") from error
    if getattr(pipe, "transformer", None) is None:
        raise ConfigError(f"{type(pipe).__name__} has no transformer to split")
    if "callback_on_step_end" not in inspect.signature(pipe.__call__).parameters:
        raise ConfigError(
            f"{type(pipe).__name__} takes no callback_on_step_end, so its steps cannot be timed"
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _steps(
    pipe: Any, given: Mapping[str, Any], look: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, list[float]]:
    """The latents of one run on the CPU, and the milliseconds of its steps but the first.

    Args:
        pipe: The pipeline.
        given: Arguments of its call.
        look: Called after each step.
    """
    ends: list[float] = []

    def note_end(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        look()
        return {}

    for _ in range(2):  # the first run warms, and has the split checked
        ends.clear()
        output = pipe(
            **given,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=note_end,
            return_dict=False,
        )[0]
    times = [(after - before) * 1000 for before, after in itertools.pairwise(ends)]
    return torch.as_tensor(output).float().cpu(), times
