"""The benchmark's picture: where a call's time goes, and its cost against the payload's size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "draw"]

MISSING = "matplotlib is not installed: pip install 'raymod[bench]'"
_PARTS = ("pack", "send", "compute", "reply")
_COLOURS = ("#4c78a8", "#72b7b2", "#f2cf5b", "#e45756")
_NAMES = {"raymod": "raymod, shared memory", "ray": "raymod, through Ray"}


def draw(calls: Mapping[str, Any], file: Path) -> bool:
    """Draw what the part `calls` measured.

    Args:
        calls: Its measurements.
        file: The png to write.

    Returns:
        False where matplotlib is not installed, and nothing was drawn.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 5.5), layout="constrained")  # without pyplot: no display, no state
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _bars(left, calls["payloads"])
    _lines(right, calls["sizes"])
    figure.savefig(file, dpi=120)
    return True


def _bars(axes: Any, payloads: Mapping[str, Any]) -> None:
    """One stacked bar for each payload and transport; the floor as a mark."""
    bars = [(case, way) for case in payloads for way in _NAMES if way in payloads[case]]
    for at, (case, way) in enumerate(bars):
        times = payloads[case]
        start = 0.0
        for part, colour in zip(_PARTS, _COLOURS, strict=True):
            width = times[way]["parts"][f"{part}_s"] * 1000
            label = part if at == 0 else None
            axes.barh(at, width, left=start, height=0.6, color=colour, label=label)
            start += width
        floor = times["floor"]["median"]
        label = "floor" if at == 0 else None
        axes.plot([floor, floor], [at - 0.4, at + 0.4], color="black", label=label)
    axes.set_yticks(range(len(bars)), [f"{case}\n{_NAMES[way]}" for case, way in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, medians")
    axes.set_title("where the time of a call goes")
    axes.legend(fontsize=8)


def _lines(axes: Any, sizes: Mapping[str, Any]) -> None:
    """Cost against size, a line for each way."""
    for way in dict.fromkeys(way for times in sizes.values() for way in times):
        at = [int(size) for size, times in sizes.items() if way in times]
        cost = [times[way]["median"] for times in sizes.values() if way in times]
        axes.plot(at, cost, marker="o", label=_NAMES.get(way, way))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("payload in, and the same out: MB")
    axes.set_ylabel("milliseconds")
    axes.set_title("cost of a call against its payload")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
