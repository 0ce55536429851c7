"""The benchmark of calls still runs."""

from __future__ import annotations

import pytest
import torch

from tests.bench import calls
from tests.conftest import RayForTests


@pytest.mark.gang
@pytest.mark.filterwarnings("ignore:batch_degree=2:UserWarning")
def test_each_way_is_measured(ray_session: RayForTests, capsys: pytest.CaptureFixture[str]) -> None:
    with calls.ways(("shared",)) as ways:
        times = calls.measure(ways, lambda: (torch.randn(1, 1000),), rounds=2, each=2)
        found = calls.row("small", times)
    assert {name: len(values) for name, values in times.items()} == {"floor": 4, "shared": 4}
    assert found["floor"]["floors"] == 1
    assert found["shared"]["ms"] > 0
    assert "small" in capsys.readouterr().out
