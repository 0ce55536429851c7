"""The same split module in plain torch.distributed processes, as torchrun would start them.

    python -m raymod.bench.spmd RANK WORLD_SIZE PORT IMAGE_ROWS IMAGE_COLUMNS TEXT BLOCKS

is one of them. It runs one step for each line that it reads, and answers with the seconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

__all__ = ["spmd"]

_LIMIT_S = 120.0
_LOOPBACK = "127.0.0.1"


@contextmanager
def spmd(
    world_size: int, *, image: tuple[int, int], text: int, blocks: int
) -> Iterator[Callable[[], float]]:
    """So many processes of one thread each, with the small Flux-like transformer.

    Args:
        world_size: Number of processes.
        image: As for `raymod.bench.model.inputs`.
        text: As for `raymod.bench.model.inputs`.
        blocks: As for `raymod.bench.model.small`.

    Yields:
        A function that has all of them run one step, and gives the seconds of the slowest, all
        having begun together.
    """
    arguments = [str(value) for value in (world_size, _free_port(), *image, text, blocks)]
    command = [sys.executable, "-W", "ignore", "-m", "raymod.bench.spmd"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]

    def step() -> float:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        return max(_answer(process) for process in processes)

    try:
        yield step
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process of torch.distributed ended; see above")
    return float(line)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((_LOOPBACK, 0))
        return int(sock.getsockname()[1])


def _serve(
    rank: int, world_size: int, port: int, rows: int, columns: int, text: int, blocks: int
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from raymod.bench import model
    from raymod.config import Degrees, ParallelConfig, PrepareConfig
    from raymod.prepare import prepare

    limit = timedelta(seconds=_LIMIT_S)
    store = TCPStore(_LOOPBACK, port, world_size, is_master=rank == 0, timeout=limit)
    dist.init_process_group(
        "cpu:gloo", store=store, rank=rank, world_size=world_size, timeout=limit
    )
    split = prepare(
        model.small(blocks=blocks),
        degrees=Degrees(ulysses_degree=world_size),
        parallel=ParallelConfig(workers=world_size),
        prepare=PrepareConfig(threads=1),
        device=torch.device("cpu"),
    )
    inputs = model.inputs(image=(rows, columns), text=text)
    split((), inputs)  # the first call is checked against the whole module
    for _ in sys.stdin:
        dist.barrier()
        began = time.perf_counter()
        split((), inputs)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
