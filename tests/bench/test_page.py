"""The table of the documentation is made of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from raymod.bench.figures import rows
from tests.bench import measured, page


def found(date: str, **parts: Any) -> dict[str, Any]:
    made = [{"cells": row.cells()} for row in rows(parts)]
    machine = {"cores": 2, "gpus": [], "torch": "2.13.0", "ray": "2.60.0"}
    return {"date": date, "machine": machine, "rows": made}


def test_each_row_is_there_once_with_its_date() -> None:
    first = found("2026-01-01", step=measured.STEP, memory=measured.memory())
    later = found("2026-02-02", step=measured.STEP | {"ratio": measured.spread(1.25)})
    head, empty, *lines = page.table([first, later]).splitlines()
    assert head == "Measured on 2 cores, no GPU, torch 2.13.0, ray 2.60.0."
    assert empty == ""
    assert len(lines) == 2 + 5
    assert {line.count("|") for line in lines} == {7}
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["2026-02-02 |"] + ["2026-01-01 |"] * 4
    assert " | 1.25 x | at most 1.03 x | NOT MET | " in lines[2]


def test_only_what_is_between_the_markers_is_replaced() -> None:
    text = f"a\n{page.BEGIN}\nold\n{page.END}\nb\n"
    assert page.put(text, "new") == f"a\n{page.BEGIN}\nnew\n{page.END}\nb\n"


@pytest.mark.parametrize(
    "text",
    ["none", f"{page.BEGIN} only", f"{page.END} {page.BEGIN}", f"{page.BEGIN}{page.END}{page.END}"],
)
def test_a_page_without_its_markers(text: str) -> None:
    with pytest.raises(ValueError, match="the page needs one"):
        page.put(text, "new")


def test_the_page_has_a_table_of_every_row() -> None:
    text = page.PAGE.read_text()
    assert page.put(text, "") != text  # the markers are there
    everything = {
        "calls": measured.calls(),
        "step": measured.STEP,
        "memory": measured.memory(),
        "startup": measured.startup(),
    }
    named = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()}
    # how large what was measured was stands in some names
    missing = [row.what for row in rows(everything) if _plain(row.what) not in map(_plain, named)]
    assert missing == []


def _plain(what: str) -> str:
    return "".join(letter for letter in what if not letter.isdigit())
