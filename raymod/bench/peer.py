"""The peer: cache-dit's wrapper that runs a transformer on Ray actors. It need not be installed."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from raymod.errors import ConfigError

__all__ = ["MISSING", "is_installed", "peer"]

MISSING = "cache-dit is not installed: pip install 'raymod[bench]'"
_CPUS_LIMIT_S = 20.0  # Ray tells of CPUs that were given back with some delay
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

    Raises:
        ConfigError: Ray has not enough CPUs left.
    """
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "INFO")
    import ray

    _check_cpus(workers)
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


def _check_cpus(workers: int) -> None:
    """The peer waits without limit for CPUs that are not there."""
    import ray

    limit = time.monotonic() + _CPUS_LIMIT_S
    while (free := ray.available_resources().get("CPU", 0)) < workers:
        if time.monotonic() > limit:
            raise ConfigError(
                f"the peer needs {workers} CPUs of Ray for itself, and {free:g} are free; start "
                f"Ray with more (ray.init(num_cpus=...)), or leave out the parts that have it"
            )
        time.sleep(0.2)


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
