from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.weights import ranks


@pytest.fixture(scope="package")
def two_processes() -> Iterator[tuple[ranks.Rank, ranks.Rank]]:
    both = (ranks.Rank(), ranks.Rank())
    yield both
    for rank in both:
        rank.close()


@pytest.fixture
def two_ranks(
    two_processes: tuple[ranks.Rank, ranks.Rank],
) -> Iterator[tuple[ranks.Rank, ranks.Rank]]:
    """Two ranks that hold nothing."""
    yield two_processes
    for rank in two_processes:
        rank.do(ranks.drop)
