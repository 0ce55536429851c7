"""Start-up and memory of a gang.

A bf16 Flux-like transformer of random weights on two CPU ranks, in a Ray whose object store is
smaller than the weights. Five ways, each in a process of its own: the module as it was made here
(`memory`), the module as diffusers loads it, which maps the file (`auto`), a skeleton
(`from_pretrained`), the same with the file out of the page cache (`cold`), and the peer. Each start
alternates with two bare actors that only import torch and the model's class, and with one memcpy of
the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from raymod.api import from_pretrained, wrap
from raymod.bench import model
from raymod.bench import peer as peers
from raymod.bench.machine import MB, pss_mb, ray_running, status_kb
from raymod.config import GangConfig

__all__ = ["WAYS", "bench_startup"]

WAYS = ("memory", "auto", "skeleton", "cold", "peer")
RANKS = 2
STORE_BYTES = 128 << 20
_START_TIMEOUT_S = 600.0
_CHILD_LIMIT_S = 600.0

# What starts a gang: gives what to call, its processes, and seconds by phase.
Started = tuple[Callable[..., Any], list[int], dict[str, float]]
Start = Callable[[], AbstractContextManager[Started]]


def bench_startup(*, quick: bool) -> dict[str, Any]:
    """The part `startup`: of each way its runs, and what they are held against."""
    megabytes, rounds = (150, 1) if quick else (2000, 3)
    found: dict[str, Any] = {"store_mb": STORE_BYTES / MB}
    with tempfile.TemporaryDirectory(prefix="raymod-bench-") as folder:
        weights_bytes = _ask(folder, "make", megabytes, rounds)["weights_bytes"]
        found["weights_mb"] = weights_bytes / MB
        for way in WAYS:
            if way != "peer" or peers.is_installed():
                found[way] = _ask(folder, way, megabytes, min(rounds, 2 if way == "peer" else 3))
    return found


def _ask(folder: str, way: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """One way, in a process of its own, so that none finds what another left in the heap."""
    command = [sys.executable, "-W", "ignore", "-m", "raymod.bench.startup"]
    done = subprocess.run(
        [*command, way, folder, str(megabytes), str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_CHILD_LIMIT_S,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def child(way: str, folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """What `_ask` asks for."""
    # as whoever starts a gang has done before
    from diffusers import FluxTransformer2DModel  # noqa: F401

    if way == "make":
        large: Any = model.large(megabytes)
        large.save_pretrained(folder)
        return {"weights_bytes": sum(parameter.nbytes for parameter in large.parameters())}
    # few tokens: the start is to be timed, and not the model
    inputs = model.inputs(image=(4, 4), text=8, dtype=torch.bfloat16)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    runs = []
    with ray_running(STORE_BYTES, cpus=2 * RANKS):
        with _bare_actors() as (_, pids):
            idle = pss_mb(os.getpid(), *pids)
        start = _start_of(way, folder, megabytes)
        for _ in range(rounds):
            read = _cold_read_s(folder) if way == "cold" else 0.0
            _drop_cache(folder, wanted=way == "cold")
            runs.append({**_measure(start, inputs, size, idle), "read_s": read})
        spilled = _spilled_mb()
    return {"runs": runs, "idle_mb": idle, "spilled_mb": spilled}


def _start_of(way: str, folder: Path, megabytes: int) -> Start:
    asked: dict[str, Any] = {
        "workers": RANKS,
        "gang": GangConfig(start_timeout_s=_START_TIMEOUT_S),
    }
    if way in ("skeleton", "cold"):
        return lambda: _gang(lambda: from_pretrained(folder, torch_dtype=torch.bfloat16, **asked))
    if way == "auto":
        from diffusers import FluxTransformer2DModel

        flux: Any = FluxTransformer2DModel
        loaded = flux.from_pretrained(folder, torch_dtype=torch.bfloat16)
        return lambda: _gang(lambda: wrap(loaded, **asked))
    made = model.large(megabytes)
    if way == "peer":
        os.chdir(folder)  # it writes its copy of the weights below the current folder
        return lambda: _peer(made)
    return lambda: _gang(lambda: wrap(made, weights="memory", **asked))


@contextmanager
def _gang(start: Callable[[], Any]) -> Iterator[Started]:
    with start() as stub:
        pids = [info.pid for info in stub.report.ranks]
        yield stub, pids, dict(stub.report.phases)


@contextmanager
def _peer(module: nn.Module) -> Iterator[Started]:
    before = _actors()
    with peers.peer(module, RANKS) as (call, times):
        pids = sorted(_actors() - before)
        yield call, pids, {"loading": times["load_s"]}


def _actors() -> set[int]:
    """Processes of the peer's actors on this machine."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::RayTransformerWorker"):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


class _Bare:
    """What a rank cannot do without."""

    def ready(self) -> int:
        import torch  # noqa: F401
        from diffusers import FluxTransformer2DModel  # noqa: F401

        return os.getpid()


@contextmanager
def _bare_actors() -> Iterator[tuple[float, list[int]]]:
    """Seconds until two bare actors have imported, and their processes."""
    began = time.perf_counter()
    actor: Any = ray.remote(num_cpus=1)(_Bare)
    actors = [actor.remote() for _ in range(RANKS)]
    pids = ray.get([each.ready.remote() for each in actors])
    yield time.perf_counter() - began, pids
    for each in actors:
        ray.kill(each)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)


def _measure(start: Start, inputs: dict[str, Any], size: int, idle_mb: float) -> dict[str, Any]:
    """One start of a gang, and what it is held against."""
    with _bare_actors() as (bare_s, _):
        pass
    memcpy_s = _memcpy_s(size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status_kb("VmRSS")
    began = time.perf_counter()
    with start() as (call, pids, phases), torch.no_grad():
        wrapped = time.perf_counter()
        peak = status_kb("VmHWM") - before
        call(**inputs)
        first = time.perf_counter()
        used = pss_mb(os.getpid(), *pids) - idle_mb
        again = time.perf_counter()
        call(**inputs)
        call_s = time.perf_counter() - again
    return {
        "bare_s": bare_s,
        "memcpy_s": memcpy_s,
        "wrap_s": wrapped - began,
        "first_s": first - began,
        "call_s": call_s,
        "phases": phases,
        # from the ranks being up to the model being ready on them
        "ready_s": sum(phases.get(name, 0.0) for name in ("joining", "loading", "splitting")),
        "peak_mb": peak * 1024 / MB,
        "used_mb": used,
    }


def _memcpy_s(size: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.perf_counter()
    target.copy_(source)
    passed = time.perf_counter() - began
    torch.set_num_threads(threads)
    return passed


def _drop_cache(folder: Path, *, wanted: bool = True) -> None:
    for path in folder.glob("*.safetensors") if wanted else ():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cold_read_s(folder: Path) -> float:
    _drop_cache(folder)
    buffer = bytearray(16 << 20)
    began = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def _spilled_mb() -> float:
    """What Ray moved from its object store to disk."""
    node: Any = ray._private.worker._global_node
    session = Path(node.get_session_dir_path())
    files = [path for path in session.glob("ray_spilled_objects*/**/*") if path.is_file()]
    return sum(path.stat().st_size for path in files) / MB


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]))))
