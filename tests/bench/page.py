"""Put what `raymod bench` measured into docs/performance.md, between its two markers.

    python -m tests.bench.page raymod-bench.json [MORE.json ...]

Of several files each row comes from the last one that has it. The picture next to the last file
with calls, if there is one, goes into docs/images/bench.png.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "bench.png"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = ("what", "measured", "figure", "", "made of", "date")


def table(found: Sequence[dict[str, Any]]) -> str:
    """The lines between the markers.

    Args:
        found: What the files hold.
    """
    rows: dict[str, tuple[str, ...]] = {}
    for each in found:
        for row in each["rows"]:
            rows[row["cells"][0]] = (*row["cells"], each["date"])
    machines = dict.fromkeys(_machine(each["machine"]) for each in found)
    lines = [f"Measured on {'; '.join(machines)}.", "", _line(HEAD), _line(["---"] * len(HEAD))]
    return "\n".join([*lines, *map(_line, rows.values())])


def put(page: str, lines: str) -> str:
    """The page with `lines` between its markers.

    Raises:
        ValueError: It does not have them, once each and in this order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in before + after:
        raise ValueError(f"the page needs one {BEGIN} and behind it one {END}")
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine(machine: dict[str, Any]) -> str:
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['cores']} cores, {gpus}, torch {machine['torch']}, ray {machine['ray']}"


def main(files: Sequence[str]) -> None:
    found = [json.loads(Path(file).read_text()) for file in files]
    PAGE.write_text(put(PAGE.read_text(), table(found)))
    for file, each in zip(files, found, strict=True):
        picture = Path(file).with_suffix(".png")
        if "calls" in each and picture.is_file():
            shutil.copyfile(picture, PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
