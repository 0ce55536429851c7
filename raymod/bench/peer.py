"""The peer: cache-dit's wrapper that runs a transformer on Ray actors. It need not be installed."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["MISSING", "is_installed", "peer"]

MISSING = "cache-dit is not installed: pip install 'raymod[bench]'"
_LOADED = re.compile(r"Loaded .* in ([\d.]+)s")


def is_installed() -> bool:
    """Whether cache-dit can be imported here."""
    return importlib.util.find_spec("cache_dit") is not None


@contextmanager
def peer(module: nn.Module, workers: int) -> Iterator[tuple[Callable[..., Any], dict[str, float]]]:
    """The module on so many actors of the peer, each of which runs all of it.

    Its own split needs GPUs. Ray must be running. A model of diffusers is saved to disk, below the
    current folder, and read back by every actor.

    Yields:
        What to call instead of the module, and the seconds it took to save and load it, as
        `load_s`, where the peer says so.
    """
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "INFO")
    import ray
    from cache_dit.distributed import ParallelismConfig
    from cache_dit.ray.engine import RayParallelEngine

    config = ParallelismConfig(
        ulysses_size=workers,
        ray_worker_options={"num_gpus": 0, "num_cpus": 1},
        ray_auto_shutdown=False,
        _ray_skip_native_parallelism=True,
    )
    notes = _Notes()
    with notes.of("CACHE_DIT", RayParallelEngine.__module__):
        engine = RayParallelEngine(module, config)
    actors = list(engine._actors)
    try:
        yield engine.forward, {"load_s": notes.load_s}
    finally:
        engine.shutdown()
        for actor in actors:
            ray.kill(actor)


class _Notes(logging.Handler):
    """Takes what the peer logs, instead of the terminal, and the one number in it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.load_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        found = _LOADED.search(record.getMessage())
        if found:
            self.load_s = float(found[1])

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        loggers = [logging.getLogger(name) for name in names]
        before = [list(logger.handlers) for logger in loggers]
        for logger in loggers:
            logger.handlers = [self]
        try:
            yield
        finally:
            for logger, handlers in zip(loggers, before, strict=True):
                logger.handlers = handlers
