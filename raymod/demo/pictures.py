"""The demo's picture: rows of generated digits under each other, with labels. PIL only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

_TILE = 96  # pixels of one digit's side
_GAP = 12
_EDGE = 28
_TITLE_SIZE, _LABEL_SIZE, _NOTE_SIZE = 20, 17, 15
_BACKGROUND, _PAPER, _BORDER = (246, 245, 241), (255, 255, 255), (214, 211, 203)
_TEXT, _FAINT = (38, 38, 43), (120, 117, 110)


def draw_rows(
    rows: Sequence[tuple[str, NDArray[Any]]], columns: Sequence[str], note: str = ""
) -> Image.Image:
    """Draw rows of pictures, each with its label on the left and one label over each column.

    Args:
        rows: Pairs of a label and pictures; pictures have shape (len(columns), height, width, 3)
            and values from 0 to 1, as a pipeline gives with `output_type="np"`.
        columns: One label a column.
        note: A line of text below; none by default.

    Returns:
        The picture, RGB.

    Raises:
        ValueError: There are no rows, or a row's shape does not fit the columns.
    """
    _check(rows, columns)
    title, label = ImageFont.load_default(_TITLE_SIZE), ImageFont.load_default(_LABEL_SIZE)
    small = ImageFont.load_default(_NOTE_SIZE)
    left = _EDGE + int(max(title.getlength(name) for name, _ in rows)) + 2 * _GAP
    top = _EDGE + _LABEL_SIZE + _GAP
    width = left + len(columns) * (_TILE + _GAP) - _GAP + _EDGE
    bottom = top + len(rows) * (_TILE + _GAP) - _GAP
    height = bottom + _EDGE + (_NOTE_SIZE + _GAP if note else 0)

    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for column, name in enumerate(columns):
        middle = left + column * (_TILE + _GAP) + _TILE / 2
        pen.text((middle, _EDGE + _LABEL_SIZE), name, font=label, fill=_FAINT, anchor="ms")
    for row, (name, pictures) in enumerate(rows):
        y = top + row * (_TILE + _GAP)
        pen.text((_EDGE, y + _TILE / 2), name, font=title, fill=_TEXT, anchor="lm")
        for column, picture in enumerate(pictures):
            _paste_tile(sheet, picture, left + column * (_TILE + _GAP), y)
    if note:
        pen.text((left, bottom + _GAP), note, font=small, fill=_FAINT, anchor="la")
    return sheet


def _check(rows: Sequence[tuple[str, NDArray[Any]]], columns: Sequence[str]) -> None:
    if not rows:
        raise ValueError("no rows to draw; pass at least one (label, pictures) pair")
    for name, pictures in rows:
        if pictures.ndim != 4 or len(pictures) != len(columns) or pictures.shape[3] != 3:
            raise ValueError(
                f"row {name!r} has pictures of shape {pictures.shape}; for {len(columns)} column"
                f" labels it must be ({len(columns)}, height, width, 3)"
            )


def _paste_tile(sheet: Image.Image, picture: NDArray[Any], x: int, y: int) -> None:
    """One digit on a card with round corners."""
    levels = np.rint(np.nan_to_num(picture).clip(0, 1) * 255).astype(np.uint8)
    tile = Image.fromarray(levels).resize((_TILE, _TILE), Image.Resampling.BICUBIC)
    card = (x - 2, y - 2, x + _TILE + 1, y + _TILE + 1)
    ImageDraw.Draw(sheet).rounded_rectangle(card, radius=8, fill=_PAPER, outline=_BORDER, width=1)
    mask = Image.new("L", (_TILE, _TILE), 0)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, _TILE - 1, _TILE - 1), radius=7, fill=255)
    sheet.paste(tile, (x, y), mask)
