"""What a call costs beyond what the module does.

An echo module on two ranks of this machine, called through shared memory and through Ray, in turns
with the peer and the floor. On a machine that does other work only ratios within one run mean
something.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from raymod import weights
from raymod.bench import peer as peers
from raymod.bench.machine import MB, ray_running, spread
from raymod.config import Degrees, GangConfig, ParallelConfig
from raymod.gang import Gang

__all__ = ["PAYLOADS", "Echo", "Way", "bench_calls", "echo_gang", "measure", "payloads", "ways"]

RANKS = 2
EMBEDDINGS = (1, 512, 4096)
PAYLOADS = {"flux-1024": (1, 4096, 64), "wan-720p": (1, 16, 21, 90, 160)}
SIZES_MB = (1, 4, 16, 64, 128, 256)
_STORE_BYTES = 1 << 30

Inputs = tuple[torch.Tensor, ...]
Make = Callable[[], Inputs]


class Echo(nn.Module):
    """Gives its first input back; takes its time if asked to."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor, nap_s: float = 0.0) -> torch.Tensor:
        """See the class.

        Args:
            x: What to give back.
            *others: Whatever else there is.
            nap_s: How long to sleep first, in seconds.
        """
        if nap_s:
            time.sleep(nap_s)
        return x


class Way:
    """One way to call the echo module.

    Args:
        call: Calls it.
        gang: The gang that it is called on, if it is one of raymod's.
    """

    def __init__(self, call: Callable[..., torch.Tensor], gang: Gang | None = None) -> None:
        self._call = call
        self._gang = gang

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """One call of the echo module."""
        return self._call(*inputs)

    def report(self) -> dict[str, float] | None:
        """Where the time and the bytes of the last call went; None where nobody says."""
        if self._gang is None or self._gang.last_call is None:
            return None
        return asdict(self._gang.last_call)


class _Floor:
    """What no way of calling another process can do without.

    One memcpy of the inputs, one wake-up of another process and back, one memcpy of the output into
    new memory.
    """

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

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
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
def echo_gang(transport: str) -> Iterator[Gang]:
    """The echo module on two ranks."""
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
def ways(names: Sequence[str]) -> Iterator[dict[str, Way]]:
    """Each way of calling, by name: `raymod`, `ray` (through Ray), `peer`; `floor` is always there.

    The peer is left out where it is not installed.
    """
    with ExitStack() as stack:
        floor = _Floor()  # forks: first of all, as little as possible is there to inherit
        stack.callback(floor.close)
        found = {"floor": Way(floor)}
        for name in names:
            if name == "peer":
                if peers.is_installed():
                    call, _ = stack.enter_context(peers.peer(Echo(), RANKS))
                    found[name] = Way(call)
                continue
            gang = stack.enter_context(echo_gang({"raymod": "shared"}.get(name, name)))
            found[name] = Way(lambda *inputs, gang=gang: gang.call(inputs, {}), gang)
        yield found


def measure(ways: dict[str, Way], make: Make, *, rounds: int, each: int) -> dict[str, Any]:
    """Time each way, a few calls of each in turn; the first turn of each does not count.

    Args:
        ways: The ways, by name.
        make: Makes the inputs of one call.
        rounds: Number of turns.
        each: Calls a turn.

    Returns:
        For each way the spread of its milliseconds, and as `parts` the medians of what it says of
        its own calls, if it does.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            several = [make() for _ in range(each)]
            time.sleep(0.02)  # torch's threads, which made them, spin for a while
            for inputs in several:
                began = time.perf_counter()
                output = way(inputs)
                took = time.perf_counter() - began
                report = way.report()
                if number > 0:
                    times[name].append(took * 1000)
                    said[name] += [report] if report else []
            if not torch.equal(output, several[-1][0]):
                raise RuntimeError(f"{name} gave back something else than it got")
    found: dict[str, Any] = {name: spread(values) for name, values in times.items()}
    for name, reports in said.items():
        if reports:
            keys = reports[0]
            found[name]["parts"] = {
                key: spread([report[key] for report in reports])["median"] for key in keys
            }
    return found


def payloads(ways: dict[str, Way], *, rounds: int, each: int) -> dict[str, Any]:
    """Milliseconds of each way at the payloads of real pipelines.

    Latents and a scalar timestep that are new with each call, and prompt embeddings that stay, or
    change as well.
    """
    cases: dict[str, Make] = {}
    for name, shape in PAYLOADS.items():
        kept = _noise(EMBEDDINGS)

        def stays(shape: tuple[int, ...] = shape, kept: torch.Tensor = kept) -> Inputs:
            return _noise(shape), kept, torch.rand(())

        def changes(shape: tuple[int, ...] = shape) -> Inputs:
            return _noise(shape), _noise(EMBEDDINGS), torch.rand(())

        cases[name] = stays
        cases[f"{name}, new embeddings"] = changes
    return {case: measure(ways, make, rounds=rounds, each=each) for case, make in cases.items()}


def sizes(ways: dict[str, Way], sizes_mb: Sequence[int], *, rounds: int) -> dict[str, Any]:
    """Milliseconds of each way at so many MB."""
    found = {}
    for size in sizes_mb:

        def make(size: int = size) -> Inputs:
            return (torch.randn(1, size * MB // 4),)

        found[str(size)] = measure(ways, make, rounds=rounds, each=3)
    return found


def bench_calls(*, quick: bool) -> dict[str, Any]:
    """The part `calls`."""
    with ray_running(_STORE_BYTES, cpus=3 * RANKS), ways(("raymod", "ray", "peer")) as found:
        rounds, each = (1, 4) if quick else (10, 10)
        return {
            "payloads": payloads(found, rounds=rounds, each=each),
            "sizes": sizes(found, SIZES_MB[:3] if quick else SIZES_MB, rounds=1 if quick else 3),
        }


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape).bfloat16()
