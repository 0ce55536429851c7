"""The short form of `python -m tests.rounds.rounds`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rounds.rounds import run


@pytest.mark.gang
def test_rounds_leave_nothing(ray_session: Any) -> None:
    assert run(4) == []
