"""Start-up and memory, each against its figure.

    python -m tests.bench.startup --megabytes 2000

A bf16 Flux-like transformer of random weights on two CPU ranks, in a Ray whose object store is
smaller than the weights. Four ways, each in a process of its own: the module as it was made here
(`memory`), the module as diffusers loads it, which maps the file (`auto`), and a skeleton
(`from_pretrained`), also with the file out of the page cache (`cold`). Each start alternates with
two bare actors that only import torch and the model's class, and with one memcpy of the weights;
medians of `--rounds`. On a machine that does other work only the memory rows mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before Ray is imported, which would write a token into the home folder otherwise.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))

import ray
import torch
from torch import nn

import raymod
from tests import models

MB = 1_000_000
STORE_BYTES = 128 << 20
BLOCK_BYTES = 31.5 * MB  # of one single block at this width, in bf16
SHAPE: dict[str, Any] = {
    "attention_head_dim": 128,
    "num_attention_heads": 8,
    "num_layers": 1,
    "in_channels": 64,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
    "axes_dims_rope": (16, 56, 56),
    "guidance_embeds": True,
}


@dataclass
class Run:
    """One start of a gang, and what it is held against."""

    bare_s: float
    memcpy_s: float
    wrap_s: float
    first_s: float
    call_s: float
    phases: dict[str, float]
    peak_mb: float
    used_mb: float

    @property
    def ready_s(self) -> float:
        """From the ranks being up to the model being ready on them."""
        return sum(self.phases.get(name, 0.0) for name in ("joining", "loading", "splitting"))


class Bare:
    """What a rank cannot do without."""

    def ready(self) -> int:
        import torch  # noqa: F401
        from diffusers import FluxTransformer2DModel  # noqa: F401

        return os.getpid()


def config_of(megabytes: int) -> dict[str, Any]:
    blocks = max(1, round((megabytes * MB - 2.8 * BLOCK_BYTES) / BLOCK_BYTES))
    return {**SHAPE, "num_single_layers": blocks}


def make(megabytes: int) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        module = FluxTransformer2DModel(**config_of(megabytes))
    module = module.to(torch.bfloat16).to_empty(device="cpu").eval()
    block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) / 32
    with torch.no_grad():
        for parameter in module.parameters():  # random enough, at the speed of a copy
            flat = parameter.view(-1)
            for at in range(0, flat.numel(), len(block)):
                part = flat[at : at + len(block)]
                part.copy_(block[: len(part)])
    return module


def inputs_of() -> dict[str, Any]:
    _, make_inputs = models.flux(**{**SHAPE, "num_layers": 1, "num_single_layers": 1})
    made = make_inputs(1, image=(8, 8), text=16)
    return {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and "ids" not in name else value
        for name, value in made.items()
    }


def status_kb(field: str, file: str = "status", pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)


def pss_mb(pids: list[int]) -> float:
    return sum(status_kb("Pss", "smaps_rollup", pid) for pid in pids) * 1024 / MB


@contextmanager
def bare_actors() -> Iterator[tuple[float, list[int]]]:
    """Seconds until two bare actors have imported, and their processes."""
    began = time.perf_counter()
    actor = ray.remote(num_cpus=1)(Bare)
    actors = [actor.remote() for _ in range(2)]
    pids = ray.get([each.ready.remote() for each in actors])
    yield time.perf_counter() - began, pids
    for each in actors:
        ray.kill(each)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)


def measure(start: Callable[[], Any], inputs: dict[str, Any], size: int, idle: float) -> Run:
    with bare_actors() as (bare, _):
        pass
    copy = memcpy_s(size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status_kb("VmRSS")
    began = time.perf_counter()
    with start() as stub:
        wrapped = time.perf_counter()
        peak = status_kb("VmHWM") - before
        with torch.no_grad():
            stub(**inputs)
        first = time.perf_counter()
        pids = [os.getpid(), *(info.pid for info in stub.report.ranks)]
        used = pss_mb(pids) - idle
        again = time.perf_counter()
        with torch.no_grad():
            stub(**inputs)
        call = time.perf_counter() - again
        phases = dict(stub.report.phases)
    return Run(bare, copy, wrapped - began, first - began, call, phases, peak * 1024 / MB, used)


def memcpy_s(size: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.perf_counter()
    target.copy_(source)
    passed = time.perf_counter() - began
    torch.set_num_threads(threads)
    return passed


def drop_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_read_s(folder: Path) -> float:
    drop_cache(folder)
    buffer = bytearray(16 << 20)
    began = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def spilled_mb() -> float:
    """What Ray moved from its object store to disk."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    files = [path for path in session.glob("ray_spilled_objects*/**/*") if path.is_file()]
    return sum(path.stat().st_size for path in files) / MB


WAYS = ("memory", "auto", "skeleton", "cold")


def child(way: str, folder: Path, rounds: int, megabytes: int) -> dict[str, Any]:
    """One way, in a process of its own, so that none finds what another left in the heap."""
    if way == "make":
        module = make(megabytes)
        module.save_pretrained(folder)
        return {"size": sum(parameter.nbytes for parameter in module.parameters())}
    from diffusers import FluxTransformer2DModel

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=STORE_BYTES,
    )
    inputs = inputs_of()
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    asked: dict[str, Any] = {"workers": 2, "gang": raymod.GangConfig(start_timeout_s=600.0)}
    with bare_actors() as (_, pids):
        idle = pss_mb([os.getpid(), *pids])
    read = 0.0
    if way == "memory":
        module = make(megabytes)
        runs = [
            measure(lambda: raymod.wrap(module, weights="memory", **asked), inputs, size, idle)
            for _ in range(rounds)
        ]
    elif way == "auto":
        module = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        runs = [
            measure(lambda: raymod.wrap(module, **asked), inputs, size, idle) for _ in range(rounds)
        ]
    else:
        runs = []
        for _ in range(rounds):
            if way == "cold":
                read = cold_read_s(folder)
                drop_cache(folder)
            runs.append(
                measure(
                    lambda: raymod.from_pretrained(folder, torch_dtype=torch.bfloat16, **asked),
                    inputs,
                    size,
                    idle,
                )
            )
    spilled = spilled_mb()
    ray.shutdown()
    found = [asdict(run) for run in runs]
    return {"runs": found, "idle_mb": idle, "read_s": read, "spilled_mb": spilled}


def row(what: str, value: float, unit: str, figure: float) -> None:
    verdict = "met" if value <= figure else "NOT MET"
    print(f"  {what:62} {value:8.2f} {unit:2} <= {figure:7.2f}  {verdict}")


def report(way: str, found: dict[str, Any], weights_mb: float) -> None:
    runs = [Run(**run) for run in found["runs"]]

    def median(of: Callable[[Run], float]) -> float:
        return statistics.median(map(of, runs))

    phases = {name: median(lambda run, name=name: run.phases[name]) for name in runs[0].phases}  # type: ignore[misc]
    bare, copy = median(lambda run: run.bare_s), median(lambda run: run.memcpy_s)
    print(
        f"{way}: bare imports {bare:.2f} s, memcpy {copy:.3f} s, idle {found['idle_mb']:.0f} MB; "
        f"wrap {median(lambda run: run.wrap_s):.2f} s, first result "
        f"{median(lambda run: run.first_s):.2f} s, a later call "
        f"{median(lambda run: run.call_s):.2f} s"
    )
    print("  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items()))
    row("wrap to first result, beyond bare imports", median(beyond), "s", 1.5)
    if way == "cold":
        ready = median(lambda run: run.ready_s) / found["read_s"]
        row(f"ranks up to model ready, per cold read ({found['read_s']:.2f} s)", ready, "x", 3.0)
    else:
        ready = median(lambda run: run.ready_s / run.memcpy_s)
        row("ranks up to model ready, per memcpy of the weights", ready, "x", 3.0)
    row("driver's extra peak during wrap", median(lambda run: run.peak_mb), "MB", 256.0)
    used = median(lambda run: run.used_mb) / weights_mb
    row("spilled to disk from an object store smaller than that", found["spilled_mb"], "MB", 0.0)
    figure = 2.1 if way in ("memory", "auto") else 1.1
    row("memory of driver and ranks beyond idle, per weights", used, "x", figure)


def beyond(run: Run) -> float:
    return run.first_s - run.bare_s


def ask(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.startup", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, folder = options.child
        print(json.dumps(child(way, Path(folder), options.rounds, options.megabytes)))
        return
    common = ["--megabytes", str(options.megabytes), "--rounds", str(options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        size = ask(*common, "--child", "make", folder)["size"]
        print(f"weights {size / MB:.0f} MB, object store {STORE_BYTES / MB:.0f} MB")
        for way in options.ways:
            report(way, ask(*common, "--child", way, folder), size / MB)


if __name__ == "__main__":
    main()
