"""The demo's picture has a tile for each digit, at its place, and readable labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raymod.demo import pictures, run
from raymod.demo.pictures import draw_rows

NAMES = run.DIGITS


def plain_tiles(seed: int) -> NDArray[Any]:
    """Ten tiles of one random colour each."""
    colours = np.random.default_rng(seed).uniform(0, 1, (10, 1, 1, 3))
    return np.broadcast_to(colours, (10, 32, 32, 3)).astype(np.float32)


def columns_and_rows(sheet: NDArray[Any], tiles: NDArray[Any]) -> list[tuple[float, float]]:
    """Centre (x, y) of each tile's colour on the sheet."""
    centres = []
    for tile in tiles:
        colour = np.rint(tile[0, 0] * 255).astype(np.uint8)
        y, x = np.nonzero((sheet == colour).all(axis=2))
        assert len(x) > 32 * 32, "the tile is missing, or no larger than it was made"
        centres.append((float(x.mean()), float(y.mean())))
    return centres


def test_two_rows_of_ten() -> None:
    rows = [("plain diffusers", plain_tiles(1)), ("raymod, 2 ranks", plain_tiles(2))]
    sheet = np.asarray(draw_rows(rows, NAMES, note="a note"))
    upper, lower = (columns_and_rows(sheet, tiles) for _, tiles in rows)
    for row in (upper, lower):
        across, down = zip(*row, strict=True)
        assert len({round(y) for y in down}) == 1
        steps = np.diff(across)
        assert (steps > 32).all()
        assert steps == pytest.approx(steps[0], abs=1)
    assert [x for x, _ in upper] == pytest.approx([x for x, _ in lower], abs=1)
    assert lower[0][1] - upper[0][1] > 64


def test_labels_are_drawn() -> None:
    rows = [("", plain_tiles(1)), ("", plain_tiles(2))]
    bare = np.asarray(draw_rows(rows, [""] * 10))
    named = np.asarray(draw_rows(rows, NAMES))
    assert named.shape == bare.shape
    changed = (named != bare).any(axis=2)
    across = [x for x, _ in columns_and_rows(bare, rows[0][1])]
    first_tile = columns_and_rows(bare, rows[0][1])[0][1] - 50
    assert not changed[int(first_tile) :].any(), "a column's label reaches into its tile"
    for x in across:
        assert changed[:, int(x) - 48 : int(x) + 48].sum() > 30

    labelled = np.asarray(draw_rows([("plain diffusers", plain_tiles(1)), rows[1]], [""] * 10))
    assert labelled.shape[1] > bare.shape[1] + 100, "a row's label has no room of its own"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([("short", plain_tiles(1)[:9])], r"'short'.*\(9, 32, 32, 3\).*\(10, height, width, 3\)"),
        ([("grey", plain_tiles(1)[..., 0])], r"'grey'.*\(10, 32, 32\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_rows(rows, NAMES)


def test_pixels_that_are_no_numbers_do_not_stop_the_picture() -> None:
    broken = np.full((10, 32, 32, 3), np.nan, np.float32)
    sheet = draw_rows([("broken", broken)], NAMES)
    assert sheet.getpixel((sheet.width - 60, 100)) == (0, 0, 0)


def test_tiles_are_enlarged_threefold() -> None:
    assert pictures._TILE == 3 * 32
