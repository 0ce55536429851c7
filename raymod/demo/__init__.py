"""The demo pipeline that ships with raymod: a tiny Flux that writes digits.

Importing this module is cheap; torch and diffusers are imported when a pipeline is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from diffusers import FluxPipeline

__all__ = ["load_pipeline", "model_path"]

_SAMPLE_SIZE = 8  # latent rows and columns; the VAE makes 4 pixels of each


def model_path() -> Path:
    """Folder of the shipped pipeline, for `FluxPipeline.from_pretrained`."""
    return Path(__file__).resolve().parent / "model"


def load_pipeline() -> FluxPipeline:
    """Load the shipped pipeline in float32 on the CPU.

    It writes 32 x 32 pictures of the digits "zero" to "nine", and does so unless a call says
    otherwise. A pipeline loaded with plain `FluxPipeline.from_pretrained(model_path())` is the
    same but for that default: Flux's own is 128 latent rows and columns, so there
    `height=32, width=32` must be passed.

    Returns:
        A `FluxPipeline`; `pipe("a handwritten seven", num_inference_steps=8).images[0]` is a
        digit.
    """
    with _only_errors("transformers", "diffusers"):
        from diffusers import FluxPipeline

        pipe: Any = FluxPipeline.from_pretrained(  # type: ignore[no-untyped-call]
            model_path(), local_files_only=True
        )
    pipe.default_sample_size = _SAMPLE_SIZE
    return cast("FluxPipeline", pipe)


@contextmanager
def _only_errors(*names: str) -> Iterator[None]:
    """Hold back notes about optional packages that the demo does not use."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
