"""What was measured, held against the figures to reach."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raymod.bench.peer import MISSING

__all__ = ["Row", "rows"]

Measured = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        part: The part of the benchmark that it belongs to.
        what: What was measured.
        value: The number that the figure is for; None where it was not measured.
        unit: Its unit; `x`: a ratio.
        figure: The number to reach.
        at_least: Whether it is to be reached from below; else it is not to be exceeded.
        note: What the number was made of, or why there is none.
    """

    part: str
    what: str
    value: float | None
    unit: str
    figure: float
    at_least: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the figure was reached; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.figure if self.at_least else self.value <= self.figure

    @property
    def verdict(self) -> str:
        """The same in a word."""
        return {None: "not measured", True: "met", False: "NOT MET"}[self.met]

    def cells(self) -> tuple[str, str, str, str, str]:
        """What, measured, figure, verdict, note."""
        bound = "at least" if self.at_least else "at most"
        value = "" if self.value is None else _number(self.value, self.unit)
        figure = f"{bound} {_number(self.figure, self.unit)}"
        return self.what, value, figure, self.verdict, self.note


def rows(measured: Measured) -> list[Row]:
    """The table for what `run_bench` measured, the parts that there are."""
    made: dict[str, Callable[[Any], Iterator[Row]]] = {
        "calls": _calls,
        "step": _step,
        "memory": _memory,
        "startup": _startup,
    }
    return [row for part, make in made.items() if part in measured for row in make(measured[part])]


# The peer's cost over raymod's: 1/50 of it is 50 times less.
_CALLS = (
    ("flux-1024", "call, flux-1024, embeddings unchanged: how many times less than the peer", 50),
    ("wan-720p", "call, wan-720p, embeddings unchanged: how many times less than the peer", 12),
    ("flux-1024, new embeddings", "call, flux-1024, new embeddings: times less than the peer", 35),
)


def _calls(found: Measured) -> Iterator[Row]:
    for case, what, figure in _CALLS:
        times = found["payloads"][case]
        note = f"raymod {_ms(times['raymod'])}, floor {_ms(times['floor'])}"
        value = None
        if "peer" in times:
            value = times["peer"]["median"] / times["raymod"]["median"]
            note += f", peer {_ms(times['peer'])}"
        else:
            note += f"; {MISSING}"
        yield Row(
            part="calls", what=what, value=value, unit="x", figure=figure, at_least=True, note=note
        )
    sizes = found["sizes"]
    costs = {int(size): times["raymod"]["median"] for size, times in sizes.items()}
    steepest, where = _steepest(costs)
    yield Row(
        part="calls",
        what=f"cost against payload, {min(costs)} to {max(costs)} MB: steepest step, over linear",
        value=steepest,
        unit="x",
        figure=1.5,
        note=f"at {where}; " + ", ".join(f"{size} MB {ms:.1f} ms" for size, ms in costs.items()),
    )
    at = sizes.get("64") or sizes[str(max(costs))]
    yield Row(
        part="calls",
        what=f"call at {64 if '64' in sizes else max(costs)} MB, over the floor",
        value=at["raymod"]["median"] / at["floor"]["median"],
        unit="x",
        figure=3,
        note=f"raymod {_ms(at['raymod'])}, floor {_ms(at['floor'])}",
    )


def _steepest(costs: dict[int, float]) -> tuple[float, str]:
    """The largest growth from one size to the next, over that of the size; and where it is."""
    ordered = sorted(costs)
    steps = [
        (costs[big] / costs[small] / (big / small), f"{small} to {big} MB")
        for small, big in itertools.pairwise(ordered)
    ]
    return max(steps)


def _step(found: Measured) -> Iterator[Row]:
    names = ("raymod", "spmd", "local", "local, 1 thread")
    yield Row(
        part="step",
        what="step of a Flux-like transformer, 2 ranks, over spmd",
        value=found["ratio"]["median"],
        unit="x",
        figure=1.03,
        note=", ".join(f"{name} {_ms(found[name], 1000)}" for name in names)
        + f"; largest difference {found['difference']:.0e}",
    )


def _memory(found: Measured) -> Iterator[Row]:
    many = found["many"]
    who = ("driver", "rank 0", "rank 1")
    grown = {name: many[name]["after"]["mb"] - many[name]["before"]["mb"] for name in who}
    yield Row(
        part="memory",
        what=f"{many['calls']} calls: growth of driver and ranks, the largest",
        value=max(grown.values()),
        unit="MB",
        figure=4,
        note=", ".join(f"{name} {mb:+.1f} MB" for name, mb in grown.items()),
    )
    yield Row(
        part="memory",
        what=f"{many['calls']} calls: open files (shared memory is one each) more than before",
        value=max(many[name]["after"]["files"] - many[name]["before"]["files"] for name in who),
        unit="",
        figure=2,
        note=", ".join(f"{name} {many[name]['after']['files']:.0f}" for name in who),
    )
    for state, what in (("idle", "an idle gang"), ("waiting", "during a forward that sleeps")):
        shares = {name: found["idle"][f"{name}, {state}"] for name in ("shared", "ray")}
        yield Row(
            part="memory",
            what=f"{what}: processor time of driver and ranks, the largest",
            value=max(max(each.values()) for each in shares.values()),
            unit="%",
            figure=2,
            note="; ".join(
                f"{name}: " + ", ".join(f"{share:.1f}" for share in each.values())
                for name, each in shares.items()
            ),
        )


def _startup(found: Measured) -> Iterator[Row]:
    def median(way: str, value: Callable[[Any], float]) -> float:
        return statistics.median(map(value, found[way]["runs"]))

    def row(what: str, value: float | None, unit: str, figure: float, note: str = "") -> Row:
        return Row(part="startup", what=what, value=value, unit=unit, figure=figure, note=note)

    def over_peer(what: str, field: str, figure: float) -> Row:
        own = median("memory", lambda run: run[field])
        value, note = None, MISSING
        if "peer" in found:
            theirs = median("peer", lambda run: run[field])
            value, note = theirs / own, f"raymod {own:.2f} s, peer {theirs:.2f} s"
        return Row(
            part="startup",
            what=what,
            value=value,
            unit="x",
            figure=figure,
            at_least=True,
            note=note,
        )

    yield over_peer("wrap to first result: how many times faster than the peer", "first_s", 1.8)
    for way in ("memory", "skeleton"):
        bare = median(way, lambda run: run["bare_s"])
        yield row(
            f"wrap to first result ({way}), beyond bare imports",
            median(way, lambda run: run["first_s"] - run["bare_s"]),
            "s",
            1.5,
            f"bare imports {bare:.2f} s",
        )
    yield over_peer("ranks up to model ready: times faster than the peer", "ready_s", 10)
    yield row(
        "ranks up to model ready (memory), over one memcpy",
        median("memory", lambda run: run["ready_s"] / run["memcpy_s"]),
        "x",
        3,
        f"memcpy {median('memory', lambda run: run['memcpy_s']):.2f} s",
    )
    yield row(
        "ranks up to model ready (checkpoint), over one cold read",
        median("cold", lambda run: run["ready_s"] / run["read_s"]),
        "x",
        3,
        f"cold read {median('cold', lambda run: run['read_s']):.2f} s",
    )
    weights_mb = found["weights_mb"]
    for way, figure in (("memory", 2.1), ("auto", 2.1), ("skeleton", 1.1)):
        used = median(way, lambda run: run["used_mb"])
        yield row(
            f"memory of driver and ranks beyond idle ({way}), over the weights",
            used / weights_mb,
            "x",
            figure,
            f"{used:.0f} MB for {weights_mb:.0f} MB" + _peers_memory(found, weights_mb),
        )
    yield row(
        "driver's extra peak during wrap, the largest",
        max(median(way, lambda run: run["peak_mb"]) for way in ("memory", "auto", "skeleton")),
        "MB",
        256,
    )
    yield row(
        f"weights of {weights_mb:.0f} MB, object store of {found['store_mb']:.0f} MB: spilled",
        max(found[way]["spilled_mb"] for way in ("memory", "auto", "skeleton")),
        "MB",
        0,
    )


def _peers_memory(found: Measured, weights_mb: float) -> str:
    if "peer" not in found:
        return ""
    used = statistics.median(run["used_mb"] for run in found["peer"]["runs"])
    return f", peer {used / weights_mb:.2f} x"


def _ms(times: Measured, scale: float = 1.0) -> str:
    low, high = times["quartiles"]
    return f"{times['median'] * scale:.2f} ms [{low * scale:.2f} {high * scale:.2f}]"


def _number(value: float, unit: str) -> str:
    digits = 0 if float(value).is_integer() or abs(value) >= 100 else 2
    return f"{value:.{digits}f} {unit}".rstrip()
