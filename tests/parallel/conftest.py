"""Ranks that all tests of this folder share, one set a world size, started when first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import forkserver

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(size)` gives processes that run a case on each rank."""
    started: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in started or not started[size].alive:
            started[size] = Ranks(size)
        return started[size]

    yield of
    for one in started.values():
        one.close()
    forkserver._forkserver._stop()
