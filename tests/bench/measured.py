"""What the parts of a benchmark return, with numbers to reckon with."""

from __future__ import annotations

from typing import Any


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "quartiles": [median * 0.9, median * 1.1], "count": 5}


def way(median: float) -> dict[str, Any]:
    names = ("pack_s", "send_s", "compute_s", "reply_s", "total_s")
    parts = dict.fromkeys(names, median / 4000) | {"sent_bytes": 1e6, "reused_bytes": 0}
    return {**spread(median), "parts": parts}


def calls(*, peer: bool = True) -> dict[str, Any]:
    def times(raymod: float, floor: float, theirs: float) -> dict[str, Any]:
        found = {"floor": spread(floor), "raymod": way(raymod), "ray": way(3 * raymod)}
        return found | ({"peer": spread(theirs)} if peer else {})

    return {
        "payloads": {
            "flux-1024": times(1.0, 0.2, 49.0),
            "flux-1024, new embeddings": times(1.0, 0.2, 36.0),
            "wan-720p": times(3.0, 2.0, 36.0),
            "wan-720p, new embeddings": times(3.0, 2.0, 40.0),
        },
        "sizes": {
            "1": times(1.0, 0.5, 10),
            "4": times(4.0, 2.0, 20),
            "16": times(25.6, 8.0, 99),
            "64": times(96.0, 31.0, 300),
        },
    }


STEP = {
    "local, 1 thread": spread(2.0),
    "local": spread(1.2),
    "spmd": spread(1.0),
    "raymod": spread(1.02),
    "ratio": spread(1.02),
    "difference": 1e-7,
}


def memory(growth: float = 0.5, percent: float = 0.3) -> dict[str, Any]:
    def grown(by: float) -> dict[str, Any]:
        return {"before": {"files": 50, "mb": 400.0}, "after": {"files": 51, "mb": 400.0 + by}}

    shares = {"driver": 0.1, "rank 0": percent, "rank 1": 0.0}
    kinds = [f"{name}, {state}" for name in ("shared", "ray") for state in ("idle", "waiting")]
    return {
        "many": {"calls": 2000, "driver": grown(0.1), "rank 0": grown(growth), "rank 1": grown(0)},
        "idle": dict.fromkeys(kinds, shares),
    }


def startup(*, peer: bool = True) -> dict[str, Any]:
    run = {
        "bare_s": 5.0,
        "memcpy_s": 0.1,
        "wrap_s": 5.4,
        "first_s": 7.0,
        "call_s": 0.5,
        "phases": {},
        "ready_s": 0.4,
        "peak_mb": 10.0,
        "used_mb": 210.0,
        "read_s": 0.2,
    }
    runs = {"runs": [run] * 3, "idle_mb": 900.0, "spilled_mb": 0.0}
    ways = dict.fromkeys(("memory", "auto", "skeleton", "cold"), runs)
    slow = {"runs": [run | {"first_s": 14.0, "ready_s": 3.0, "used_mb": 500.0}]}
    return {**ways, "store_mb": 50.0, "weights_mb": 100.0} | ({"peer": slow} if peer else {})
