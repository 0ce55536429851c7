"""The benchmark of the start still fits what it measures; its figures are not judged here."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from tests.bench import startup


def test_the_model_has_the_size_asked_for() -> None:
    module = startup.make(150)
    assert sum(parameter.nbytes for parameter in module.parameters()) == pytest.approx(
        150 * startup.MB, rel=0.1
    )
    with torch.no_grad():
        output = module(**startup.inputs_of())[0]
    assert output.dtype is torch.bfloat16
    assert output.isfinite().all()


def test_each_row_says_whether_its_figure_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    phases = {"starting": 5.0, "joining": 0.1, "loading": 0.2, "splitting": 0.1, "ready": 0.0}
    run = startup.Run(5.0, 0.1, 5.4, 7.0, 0.5, phases, 10.0, 220.0)
    found = {"runs": [asdict(run)] * 3, "idle_mb": 900.0, "read_s": 0.0, "spilled_mb": 0.0}
    startup.report("memory", found, weights_mb=100.0)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "<=" in line]
    assert [float(row[row.index("<=") - 2]) for row in rows] == [2.0, 4.0, 10.0, 0.0, 2.2]
    assert [" ".join(row[row.index("<=") + 2 :]) for row in rows] == [
        "NOT MET",
        "NOT MET",
        "met",
        "met",
        "NOT MET",
    ]
