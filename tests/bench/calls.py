"""What a call costs beyond what the module does.

    python -m tests.bench.calls                 # at the payloads of real pipelines
    python -m tests.bench.calls --sizes         # cost against payload size, 1 to 256 MB
    python -m tests.bench.calls --idle 10       # processor time of a gang that waits
    python -m tests.bench.calls --many 2000     # open files and memory before and after

An echo module on two ranks of this machine, called through shared memory and through Ray, in turns
with the floor: one memcpy of the inputs, one wake-up of another process and back, one memcpy of the
output into new memory. Medians with the quartiles, in milliseconds, of twenty calls in a row; the
first after a pause takes about twice as long. On a machine that does other work only ratios within
one run mean something.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import secrets
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

# Before Ray is imported, which would write a token into the home folder otherwise.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))

import ray
import torch
from torch import nn

from raymod import weights
from raymod.config import Degrees, GangConfig, ParallelConfig
from raymod.gang import Gang

MB = 1_000_000
RANKS = 2
EMBEDDINGS = (1, 512, 4096)
PAYLOADS = {"flux-1024": (1, 4096, 64), "wan-720p": (1, 16, 21, 90, 160)}
SIZES_MB = (1, 4, 16, 64, 128, 256)

Inputs = tuple[torch.Tensor, ...]


class Echo(nn.Module):
    """Gives its first input back; takes its time if asked to."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor, nap_s: float = 0.0) -> torch.Tensor:
        time.sleep(nap_s)
        return x


class Floor:
    """What no way of calling another process can do without."""

    def __init__(self) -> None:
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._line.close()
            while other.recv(1):
                other.send(b"!")
            os._exit(0)
        other.close()
        self._rooms: dict[int, torch.Tensor] = {}

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        for index, tensor in enumerate(inputs):
            self._room(index, tensor).numpy()[:] = _bytes(tensor)
        self._line.send(b"?")
        self._line.recv(1)
        output = torch.empty_like(inputs[0])
        _bytes(output)[:] = self._room(0, inputs[0]).numpy()
        return output

    def close(self) -> None:
        self._line.close()
        os.waitpid(self._pid, 0)

    def _room(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        room = self._rooms.get(index)
        if room is None or room.nbytes != tensor.nbytes:
            room = self._rooms[index] = torch.zeros(tensor.nbytes, dtype=torch.uint8)
        return room


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


@contextmanager
def gang(transport: str) -> Iterator[Gang]:
    with weights.offer("auto", Echo()) as offer:
        started = Gang.start(
            degrees=Degrees(batch_degree=RANKS),
            parallel=ParallelConfig(workers=RANKS, batch_degree=RANKS, verify=False),
            load=offer,
            config=GangConfig(transport=transport),
            progress=lambda phase: None,
        )
    with started:
        yield started


@contextmanager
def ways(names: tuple[str, ...]) -> Iterator[dict[str, Callable[[Inputs], torch.Tensor]]]:
    """Each way of calling, by name; `floor` is always among them."""
    with ExitStack() as stack:
        floor = Floor()
        stack.callback(floor.close)
        found: dict[str, Callable[[Inputs], torch.Tensor]] = {"floor": floor}
        for name in names:
            started = stack.enter_context(gang(name))
            found[name] = lambda inputs, started=started: started.call(inputs, {})
        yield found


def measure(
    ways: dict[str, Callable[[Inputs], torch.Tensor]],
    make: Callable[[], Inputs],
    *,
    rounds: int,
    each: int,
) -> dict[str, list[float]]:
    """Milliseconds of each way, a few calls of each in turn; the first call of each is left out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, call in ways.items():
            several = [make() for _ in range(each)]
            time.sleep(0.02)  # torch's threads, which made them, spin for a while
            for inputs in several:
                began = time.perf_counter()
                output = call(inputs)
                took = time.perf_counter() - began
                if number > 0:
                    times[name].append(took * 1000)
            assert torch.equal(output, several[-1][0])
    return times


def row(label: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print and return the medians and quartiles, and how many times the floor they are."""
    floor = statistics.median(times["floor"])
    found: dict[str, Any] = {"payload": label}
    cells = []
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        found[name] = {"ms": median, "quartiles": [low, high], "floors": median / floor}
        cells.append(f"{name} {median:8.3f} [{low:8.3f} {high:8.3f}] x{median / floor:5.1f}")
    print(f"{label:32} {'   '.join(cells)}", flush=True)
    return found


def payloads(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with ways(("shared", "ray")) as found:
        for name, shape in PAYLOADS.items():
            kept = torch.randn(EMBEDDINGS).bfloat16()

            def latents(shape: tuple[int, ...] = shape) -> torch.Tensor:
                return torch.randn(shape).bfloat16()

            cases: dict[str, Callable[[], Inputs]] = {
                name: lambda latents=latents: (latents(),),
                f"{name} + embeddings": lambda latents=latents, kept=kept: (latents(), kept),
                f"{name} + embeddings that change": lambda latents=latents: (
                    latents(),
                    torch.randn(EMBEDDINGS).bfloat16(),
                ),
            }
            rows += [
                row(case, measure(found, make, rounds=rounds, each=20))
                for case, make in cases.items()
            ]
    return rows


def sizes(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with ways(("shared",)) as found:
        for size in SIZES_MB:

            def make(size: int = size) -> Inputs:
                return (torch.randn(1, size * MB // 4),)

            times = measure(found, make, rounds=rounds, each=3)
            rows.append(row(f"{size} MB", times))
    return rows


def idle(seconds: float) -> list[dict[str, Any]]:
    """Processor time of driver and ranks in percent of a core: idle, and during a long forward."""
    rows = []
    x = torch.zeros(1000)
    for transport in ("shared", "ray"):
        with gang(transport) as started:
            started.call((x,), {})
            waiting = threading.Thread(target=started.call, args=((x,), {"nap_s": seconds + 2}))
            for label, begin in (("idle", lambda: None), ("in a forward", waiting.start)):
                begin()
                time.sleep(1.0)
                pids = [os.getpid(), *(info.pid for info in started.report.ranks)]
                before = [_cpu_s(pid) for pid in pids]
                time.sleep(seconds)
                shares = [
                    100 * (_cpu_s(pid) - spent) / seconds
                    for pid, spent in zip(pids, before, strict=True)
                ]
                rows.append({"transport": transport, "state": label, "percent": shares})
                text = ", ".join(f"{share:.2f}" for share in shares)
                print(f"{transport:7} {label:14} driver and ranks, % of a core: {text}", flush=True)
            waiting.join()
    return rows


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def many(calls: int) -> list[dict[str, Any]]:
    """Open files and proportional memory of driver and ranks, before and after so many calls."""
    with gang("shared") as started:

        def some(count: int) -> None:
            kept = torch.randn(EMBEDDINGS).bfloat16()
            for number in range(count):
                if number % 50 == 0:  # a new prompt
                    kept = torch.randn(1, 256 + number % 3 * 128, 4096).bfloat16()
                latents = torch.randn(PAYLOADS["flux-1024"]).bfloat16()
                started.call((latents, kept), {})

        some(200)
        before = [_size(), *started.call_all(_size)]
        some(calls)
        after = [_size(), *started.call_all(_size)]
    rows = []
    for who, one, other in zip(("driver", "rank 0", "rank 1"), before, after, strict=True):
        print(f"{who}: {one['files']} -> {other['files']} files, {one['MB']:.1f} -> ", end="")
        print(f"{other['MB']:.1f} MB", flush=True)
        rows.append({"who": who, "before": one, "after": other})
    return rows


def _size(worker: Any = None) -> dict[str, float]:
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        pss = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return {"files": len(os.listdir("/proc/self/fd")), "MB": pss * 1024 / MB}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of twenty calls a way")
    parser.add_argument("--sizes", action="store_true", help="cost against payload size")
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="processor time of waiting")
    parser.add_argument("--many", type=int, metavar="CALLS", help="what many calls leave")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "batch_degree=2:")
    ray.init(
        address="local",
        num_cpus=2 * RANKS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=600 * MB,
    )
    try:
        if options.idle:
            rows = idle(options.idle)
        elif options.many:
            rows = many(options.many)
        else:
            rows = (sizes if options.sizes else payloads)(options.rounds)
    finally:
        ray.shutdown()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
