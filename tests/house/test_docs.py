"""The documentation says what is so: its examples run, its tables match the code."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import raymod
from tests.house.imports import ROOMS, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TIMEOUT_S = 400  # about 20 s a page on two quiet cores
END_S = 30


def _script(page: str) -> str:
    """The python blocks of a page as one script, each line where it stands on the page."""
    lines, inside = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


def _scripts() -> dict[str, str]:
    scripts = {path.relative_to(ROOT).as_posix(): _script(path.read_text()) for path in PAGES}
    return {name: script for name, script in scripts.items() if script.strip()}


@pytest.mark.gang
@pytest.mark.timeout(TIMEOUT_S + 2 * END_S)
@pytest.mark.parametrize("name", _scripts())
def test_the_python_blocks_of_a_page_run_in_order(name: str, tmp_path: Path) -> None:
    script = tmp_path / Path(name).with_suffix(".py").name
    script.write_text(_scripts()[name])
    code, output = _run(script)
    assert code == 0, output[-8000:]
    assert "Traceback" not in output, output[-8000:]


def _run(script: Path) -> tuple[int, str]:
    """Exit code and output of a script; one that takes too long is asked to clean up first."""
    process = subprocess.Popen(
        [sys.executable, script],
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            return -1, f"{output}\nstopped after {TIMEOUT_S} s"
    return process.returncode, output


def test_blocks_keep_their_lines() -> None:
    page = "# Title\n\n```python\na = 1\n```\n\n```text\nno\n```\n```python\nb = a\n```\n"
    assert _script(page).splitlines()[3] == "a = 1"
    assert _script(page).split() == ["a", "=", "1", "b", "=", "a"]


def test_every_error_has_a_section_with_cause_and_remedy() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert set(sections) == {name for name in raymod.__all__ if name.endswith("Error")}
    bases = {"RaymodError", "GangError"}
    for name, text in sections.items():
        if name not in bases:
            assert "**Cause:**" in text, name
            assert "**Remedy:**" in text, name


def test_the_table_of_the_house_is_the_one_that_is_tested() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \| .* \|(.*?)\|$", page, re.MULTILINE)
    written = {
        (int(row), frozenset(re.findall(r"`(\w+)`", modules))): never.strip()
        for row, modules, never in rows
    }
    tested = {
        (room.row, frozenset(room.modules) - {"__main__"}): ", ".join(room.never).replace(
            "raymod.", ""
        )
        for room in ROOMS
    }
    assert written.keys() == tested.keys()
    for key in written.keys() - {(0, frozenset({"errors"}))}:  # told in words there
        assert written[key] == tested[key], key
