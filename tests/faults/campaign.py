"""Random faults at random moments: each run ends exact, or with an error that has a name.

    python -m tests.faults.campaign --runs 200

A run wraps a small model, calls it, loads a LoRA, calls it, changes the LoRA, calls it, and closes.
At some moment in it something goes wrong. What counts at its end:

    survived   every output was exact, on the ranks that there were
    recovered  every output was exact, on ranks that were started anew without a word to the caller
    refused    a call raised an error with a name; after a restart the run went on, exact
    lost       anything else: a wrong number, another exception, too long, something left behind
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
import torch
from ray.util import placement_group_table

import raymod
from tests.api.test_pipelines import difference
from tests.module.sequences import flux, lora
from tests.module.test_sequences import call

TOLERANCE = 1e-5
CALL_TIMEOUT_S = 8.0
RUN_LIMIT_S = 120.0
NAMED = (raymod.RaymodError, KeyboardInterrupt, LookupError)

FAULTS = ("kill", "stop", "exit", "raise", "raise on all", "hang", "interrupt")
MOMENTS = ("start", "calls", "between", "lora", "close")


@dataclass
class Run:
    """One run: what goes wrong in it, when, and what came of it."""

    number: int
    ranks: int
    fault: str
    moment: str
    rank: int
    delay_s: float
    outcome: str = ""
    what: str = ""
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = f" ({'; '.join(self.errors)})" if self.errors else ""
        return (
            f"{self.number:4d}  {self.ranks} ranks  {self.fault:12s} {self.moment:8s} "
            f"rank {self.rank} after {self.delay_s:.2f} s: {self.outcome} in {self.seconds:.1f} s "
            f"{self.what}{told}"
        )


def plan(number: int, seed: int, ranks: tuple[int, ...]) -> Run:
    """The run of a number; the same for the same seed."""
    chance = random.Random(f"{seed} {number}")
    moment = MOMENTS[number % len(MOMENTS)]
    faults = FAULTS
    if moment == "start":
        faults = ("kill", "stop", "interrupt")
    elif moment in ("between", "close"):
        faults = ("kill", "stop", "exit")
    count = chance.choice(ranks)
    return Run(
        number=number,
        ranks=count,
        fault=chance.choice(faults),
        moment=moment,
        rank=chance.randrange(count),
        delay_s=chance.uniform(0.0, 2.5 if moment == "start" else 0.15),
    )


class Trouble:
    """Makes the fault of a run happen."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def at_once(self, stub: Any = None) -> None:
        fault, rank = self.run.fault, self.run.rank
        if fault == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif fault in ("kill", "stop"):
            pids = [info.pid for info in stub.report.ranks] if stub is not None else rank_pids()
            if pids:
                number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[rank % len(pids)], number)
        elif stub is not None:
            who = list(range(self.run.ranks)) if fault == "raise on all" else [rank]
            stub.gang.call_all(arm, fault, who)

    def soon(self, stub: Any = None) -> threading.Timer:
        timer = threading.Timer(self.run.delay_s, self.at_once, [stub])
        timer.start()
        return timer


def arm(worker: Any, fault: str, ranks: list[int]) -> None:
    """On a rank: let its next forward go wrong."""
    if worker.rank not in ranks:
        return

    def misbehave(module: Any, args: Any, kwargs: Any) -> None:
        handle.remove()
        if fault == "exit":
            os._exit(3)
        if fault == "hang":
            time.sleep(600)
        raise LookupError("the campaign wants an error here")

    part = worker.module.single_transformer_blocks[0]
    handle = part.register_forward_pre_hook(misbehave, with_kwargs=True)


def rank_pids() -> list[int]:
    """Processes of ranks under this one, whose Ray this is; in the order of their numbers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == ["ray::RankActor"]:
                found.append(process.pid)
    return sorted(found)


def steps(plain: Any) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """What a run does, and what it should give; `plain` goes along."""
    weights = lora(flux(), 3)
    yield "calls", call, call(plain)
    yield "calls", call, call(plain)

    def load(module: Any) -> None:
        if "a" not in getattr(module, "peft_config", {}):
            module.load_lora_adapter(dict(weights), adapter_name="a")

    load(plain)
    yield "lora", load, None
    yield "calls", call, call(plain)
    plain.set_adapters("a", 0.5)
    yield "lora", lambda module: module.set_adapters("a", 0.5), None
    yield "between", call, call(plain)


def carry_out(run: Run) -> None:
    """One run, judged."""
    began = time.monotonic()
    trouble = Trouble(run)
    shared = set(os.listdir("/dev/shm"))
    stub: Any = None
    try:
        stub = begun(run, trouble)
        restarted = go_through(run, stub, trouble)
        if run.moment == "close":
            trouble.at_once(stub)
        stub.close()
        silent = stub.gang.restarts.number - restarted
        run.outcome = "refused" if run.errors else "recovered" if silent else "survived"
    except NAMED as error:
        run.outcome, run.what = "refused", type(error).__name__
    except BaseException as error:
        run.outcome, run.what = "lost", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        with contextlib.suppress(BaseException):
            if stub is not None:
                stub.close()
    run.seconds = time.monotonic() - began
    left = left_behind(shared)
    if left:
        run.outcome, run.what = "lost", f"{run.what} left behind: {left}"
    if run.seconds > RUN_LIMIT_S:
        run.outcome, run.what = "lost", f"{run.what} took too long"


def begun(run: Run, trouble: Trouble) -> Any:
    """The stub; a start that goes wrong is tried once more, as a user would."""
    config = raymod.GangConfig(
        start_timeout_s=40.0, call_timeout_s=CALL_TIMEOUT_S, close_timeout_s=3.0
    )
    # four heads, so four ranks too
    options: dict[str, Any] = {"ulysses_degree": run.ranks, "gang": config}
    timer = trouble.soon() if run.moment == "start" else None
    try:
        stub = raymod.wrap(flux(), **options)
        if timer is not None:
            timer.join()  # what comes after the start comes before the first call
        return stub
    except NAMED as error:
        run.errors.append(type(error).__name__)
        if timer is not None:
            timer.join()
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(0.01)  # an interrupt that was on its way
        return raymod.wrap(flux(), **options)


def go_through(run: Run, stub: Any, trouble: Trouble) -> int:
    """All steps, each repeated after an error with a name; how often it was restarted for that."""
    restarted = 0
    done = run.moment in ("start", "close")
    timer: threading.Timer | None = None
    for number, (moment, step, expected) in enumerate(steps(flux())):
        if not done and moment == run.moment and number >= run.number % 3:
            done = True
            if moment == "between" or run.fault not in ("kill", "stop", "interrupt"):
                trouble.at_once(stub)
            else:
                timer = trouble.soon(stub)
        for attempt in range(3):
            try:
                found = step(stub)
                if timer is not None:
                    timer.join()
                break
            except NAMED as error:
                if attempt == 2:
                    raise
                run.errors.append(type(error).__name__)
                if timer is not None:
                    timer.join()
                try:
                    stub.health()
                except raymod.GangFailedError:
                    stub.restart()
                    restarted += 1
        if expected is not None and difference(found, expected) > TOLERANCE:
            raise AssertionError(f"step {number} is off by {difference(found, expected):.1e}")
    return restarted


def left_behind(shared: set[str]) -> str:
    """What there is that should be gone by now."""
    deadline = time.monotonic() + 30
    while True:
        groups = [v for v in placement_group_table().values() if v["state"] != "REMOVED"]
        left = {
            "ranks": rank_pids(),
            "groups": len(groups),
            "shared memory": sorted(set(os.listdir("/dev/shm")) - shared),
        }
        found = {name: value for name, value in left.items() if value}
        if not found:
            return ""
        if time.monotonic() > deadline:
            return str(found)
        time.sleep(0.2)


def campaign(
    numbers: Iterable[int], *, seed: int = 0, ranks: tuple[int, ...] = (2, 2, 2, 4)
) -> Counter[str]:
    """Runs of these numbers, in a Ray that is there already; how many came to which end."""
    ends: Counter[str] = Counter(dict.fromkeys(("survived", "recovered", "refused", "lost"), 0))
    for number in numbers:
        run = plan(number, seed, ranks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            carry_out(run)
        ends[run.outcome] += 1
        print(run, flush=True)
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--only", help="numbers of runs, with commas between them")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.getLogger("raymod").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    began = time.monotonic()
    try:
        numbers = map(int, asked.only.split(",")) if asked.only else range(asked.runs)
        ends = campaign(numbers, seed=asked.seed)
    finally:
        ray.shutdown()
    print(
        " / ".join(f"{name} {count}" for name, count in ends.items()),
        f"in {time.monotonic() - began:.0f} s",
    )
    return 1 if ends["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
