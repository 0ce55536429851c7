"""What was measured against the figures: which are met, and the picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raymod.bench import PARTS, peer
from raymod.bench.figures import Row, rows
from raymod.bench.picture import draw
from tests.bench import measured

EVERYTHING = {
    "calls": measured.calls(),
    "step": measured.STEP,
    "memory": measured.memory(),
    "startup": measured.startup(),
}


def values(part: str) -> list[tuple[float | None, bool | None]]:
    found = [row for row in rows(EVERYTHING) if row.part == part]
    return [(row.value and round(row.value, 2), row.met) for row in found]


def test_calls_against_the_peer_the_line_and_the_floor() -> None:
    assert values("calls") == [
        (49, False),
        (12, True),
        (36, True),
        (1.6, False),  # from 4 to 16 MB: four times the bytes, 6.4 times the cost
        (round(96 / 31, 2), False),
    ]


def test_a_step_against_plain_processes() -> None:
    assert values("step") == [(1.02, True)]


def test_what_stays_of_many_calls_and_what_waiting_costs() -> None:
    assert values("memory") == [(0.5, True), (1, True), (0.3, True), (0.3, True)]
    found = rows({"memory": measured.memory(growth=4.5, percent=2.5)})
    assert [row.met for row in found] == [False, True, False, False]


def test_start_up_and_memory() -> None:
    assert values("startup") == [
        (2.0, True),
        (2.0, False),
        (2.0, False),
        (7.5, False),
        (4.0, False),
        (2.0, True),
        (2.1, True),
        (2.1, True),
        (2.1, False),
        (10.0, True),
        (0.0, True),
    ]


def test_without_the_peer_its_rows_say_so() -> None:
    found = {"calls": measured.calls(peer=False), "startup": measured.startup(peer=False)}
    missing = [row for row in rows(found) if row.met is None]
    assert len(missing) == 5
    assert all(peer.MISSING in row.note for row in missing)
    assert {row.verdict for row in missing} == {"not measured"}


def test_each_row_says_its_figure() -> None:
    one = Row(part="calls", what="a", value=1.25, unit="x", figure=1.5, note="made of")
    assert one.cells() == ("a", "1.25 x", "at most 1.50 x", "met", "made of")
    other = Row(part="calls", what="b", value=None, unit="", figure=2, at_least=True)
    assert other.cells() == ("b", "", "at least 2", "not measured", "")
    assert {row.part for row in rows(EVERYTHING)} == set(PARTS)


@pytest.mark.parametrize("with_peer", [True, False])
def test_the_picture_has_bars_and_lines(tmp_path: Path, with_peer: bool) -> None:
    file = tmp_path / "bench.png"
    assert draw(measured.calls(peer=with_peer), file)
    pixels = np.asarray(Image.open(file).convert("RGB"))
    left, right = np.array_split(pixels, 2, axis=1)
    for half in (left, right):
        colours = np.unique(half.reshape(-1, 3), axis=0)
        assert len(colours) > 50
    assert ((left == (0x4C, 0x78, 0xA8)).all(axis=-1)).sum() > 1000  # a bar of packing
