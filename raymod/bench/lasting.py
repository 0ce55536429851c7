"""What a gang takes while it waits, and what many calls leave behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import torch

from raymod.bench.calls import EMBEDDINGS, PAYLOADS, RANKS, echo_gang
from raymod.bench.machine import cpu_s, pss_mb, ray_running

__all__ = ["bench_memory"]

_STORE_BYTES = 256 << 20
_WHO = ("driver", "rank 0", "rank 1")
_WARM_CALLS = 200


def bench_memory(*, quick: bool) -> dict[str, Any]:
    """The part `memory`."""
    with ray_running(_STORE_BYTES, cpus=RANKS):
        return {
            "many": _many(100 if quick else 2000),
            "idle": _idle(0.5 if quick else 10.0),
        }


def _many(calls: int) -> dict[str, Any]:
    """Open files and memory of driver and ranks, before and after so many calls."""
    with echo_gang("shared") as gang:

        def some(count: int) -> None:
            kept = torch.empty(0)
            for number in range(count):
                if number % 50 == 0:  # a new prompt
                    kept = torch.randn(1, 256 + number // 50 % 3 * 128, EMBEDDINGS[2]).bfloat16()
                gang.call((torch.randn(PAYLOADS["flux-1024"]).bfloat16(), kept), {})

        some(_WARM_CALLS)
        before = [_size(), *gang.call_all(_size)]
        some(calls)
        after = [_size(), *gang.call_all(_size)]
    return {
        "calls": calls,
        **{
            who: {"before": one, "after": other}
            for who, one, other in zip(_WHO, before, after, strict=True)
        },
    }


def _size(worker: Any = None) -> dict[str, float]:
    gc.collect()
    return {"files": len(os.listdir("/proc/self/fd")), "mb": pss_mb("self")}


def _idle(seconds: float) -> dict[str, Any]:
    """Processor time of driver and ranks in percent of a core: idle, and during a long forward."""
    found = {}
    x = torch.zeros(1000)
    for transport in ("shared", "ray"):
        with echo_gang(transport) as gang:
            gang.call((x,), {})
            waiting = threading.Thread(target=gang.call, args=((x,), {"nap_s": seconds + 2}))
            for state in ("idle", "waiting"):
                if state == "waiting":
                    waiting.start()
                time.sleep(1.0)
                pids = [os.getpid(), *(info.pid for info in gang.report.ranks)]
                before = [cpu_s(pid) for pid in pids]
                time.sleep(seconds)
                shares = [
                    100 * (cpu_s(pid) - spent) / seconds
                    for pid, spent in zip(pids, before, strict=True)
                ]
                found[f"{transport}, {state}"] = dict(zip(_WHO, shares, strict=True))
            waiting.join()
    return found
