"""What a start says, and where."""

from __future__ import annotations

import io
import logging

import pytest

from raymod.gang import progress
from raymod.gang.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    return clock


def go_through(steps: Progress, clock: Clock) -> None:
    with steps:
        for seconds, phase in enumerate(("placing", "starting", "loading", "ready"), 1):
            steps.enter(phase)
            clock.now += seconds


def test_a_terminal_gets_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="raymod")
    terminal = Terminal()
    steps = Progress(stream=terminal)
    go_through(steps, clock)
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "\rraymod: waiting for devices" in text
    # whatever was longer before is wiped
    assert "\rraymod: ready after 6.0 s".ljust(len("\rraymod: starting the ranks")) in text
    assert caplog.records == []
    assert steps.phases == {"placing": 1.0, "starting": 2.0, "loading": 3.0, "ready": 4.0}


def test_elsewhere_it_is_log_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="raymod")
    stream = io.StringIO()
    go_through(Progress(stream=stream), clock)
    assert stream.getvalue() == ""
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for devices",
        "starting the ranks",
        "moving the weights",
        "ready after 6.0 s",
    ]


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_it_is_silent_if_the_logger_is(
    stream: io.StringIO, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="raymod")
    go_through(Progress(stream=stream), clock)
    assert stream.getvalue() == ""
    assert caplog.records == []


def test_a_function_hears_the_phases_instead(clock: Clock) -> None:
    heard: list[str] = []
    terminal = Terminal()
    go_through(Progress(heard.append, terminal), clock)
    assert heard == ["placing", "starting", "loading", "ready"]
    assert terminal.getvalue() == ""


def test_notes_come_at_growing_intervals(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="raymod")
    steps = Progress(stream=io.StringIO())
    steps.enter("placing")
    for _ in range(600):
        clock.now += 0.5
        steps.note(lambda: f"{clock.now:.0f}")
    times = [float(r.getMessage().rpartition(" ")[2]) - 100 for r in caplog.records[1:]]
    assert times == [2, 4, 8, 16, 32, 64, 124, 184, 244]


def test_after_an_error_the_line_is_wiped(clock: Clock) -> None:
    terminal = Terminal()
    with pytest.raises(LookupError), Progress(stream=terminal) as steps:  # noqa: PT012
        steps.enter("placing")
        raise LookupError
    assert terminal.getvalue().endswith("\r" + " " * len("raymod: waiting for devices") + "\r")


def test_there_may_be_no_standard_error(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="raymod")
    monkeypatch.setattr("sys.stderr", None)
    go_through(Progress(), clock)
    assert len(caplog.records) == 4


def test_a_line_is_no_longer_than_the_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    steps = Progress(stream=terminal)
    steps.enter("placing")
    clock.now += 10
    steps.note(lambda: "2 ranks want more than there is, and this goes on")
    assert max(len(part) for part in terminal.getvalue().split("\r")) == 29
