"""Ranks to run cases in: processes that are started once and share a gloo group."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = mp.get_context("forkserver")
# Imported once, in the server that the ranks are forked from.
_context.set_forkserver_preload(["diffusers", "diffusers.models.transformers", "tests.models"])


class RankFailedError(AssertionError):
    """What the ranks raised, as text."""


class Ranks:
    """`size` processes, one thread each, joined by gloo."""

    def __init__(self, size: int, *, timeout_s: float = 60) -> None:
        """Start them; a collective of theirs fails after `timeout_s`."""
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(theirs, rank, size, store, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(
        self, function: Callable[..., Any], *args: Any, limit_s: float = 120, **kwargs: Any
    ) -> list[Any]:
        """`function(*args, **kwargs)` on every rank; what each returned, in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + limit_s
        while len(results) + len(errors) < self.size:
            waiting = [p for r, p in enumerate(self._pipes) if r not in {*results, *errors}]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankFailedError(f"no answer within {limit_s} s: {errors or 'no error'}")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = pipe.recv()  # type: ignore[union-attr]
                (results if ok else errors)[rank] = value
        if errors:
            raise RankFailedError("\n".join(f"rank {r}: {e}" for r, e in sorted(errors.items())))
        return [results[rank] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args, kwargs = job
        try:
            answer = True, function(*args, **kwargs)
        except Exception:
            answer = False, traceback.format_exc()
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))
    if size > 1:
        dist.destroy_process_group()
