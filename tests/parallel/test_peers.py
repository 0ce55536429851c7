"""Simulated ranks exchange what real ones do, and never leave one another waiting."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from raymod.errors import SplitError
from raymod.parallel.mesh import part_sizes, part_start
from raymod.parallel.peers import Peers, simulate
from tests.parallel import cases
from tests.parallel.test_sequence import World


def gathered(peers: Peers, dim: int) -> torch.Tensor:
    """A tensor that was cut unevenly, put together again, its sizes said and asked for."""
    whole = torch.arange(5 * 7 * 3, dtype=torch.bfloat16).view(5, 7, 3)
    total = whole.shape[dim]
    sizes = part_sizes(total, peers.degree)
    start = part_start(total, peers.degree, peers.rank)
    part = whole.narrow(dim, start, sizes[peers.rank])
    assert torch.equal(peers.gather(part, dim), whole)
    return peers.gather(part, dim, sizes)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_gather(degree: int, dim: int) -> None:
    whole = torch.arange(5 * 7 * 3, dtype=torch.bfloat16).view(5, 7, 3)
    for found in simulate(degree, lambda peers: gathered(peers, dim)):
        assert torch.equal(found, whole)


def test_real_ranks_do_the_same(ranks: World) -> None:
    (simulated, _), (first, _) = simulate(2, cases.exchanged), ranks(2)(cases.exchanged_by_group)
    assert torch.equal(simulated[0], first[0])
    assert simulated[1] == first[1] == [(0, 10), (1, 11)]


def test_grad_mode_is_the_caller_s() -> None:
    with torch.no_grad():
        assert simulate(2, lambda _: torch.is_grad_enabled()) == [False, False]
    with torch.inference_mode():
        assert simulate(2, lambda _: torch.is_inference_mode_enabled()) == [True, True]
    assert simulate(2, lambda _: torch.is_grad_enabled()) == [True, True]


def fails(peers: Peers) -> None:
    if peers.rank == 1:
        raise ArithmeticError("only here")
    peers.numbers([1])


def leaves(peers: Peers) -> None:
    if peers.rank == 0:
        peers.numbers([1])


def mixes(peers: Peers) -> None:
    if peers.rank == 0:
        peers.numbers([1])
    else:
        peers.gather(torch.ones(2), 0)


def differs(peers: Peers) -> None:
    peers.gather(torch.ones(2, 3 + peers.rank), 0)


def lies(peers: Peers) -> None:
    peers.gather(torch.ones(2, 3), 0, [2, 1])


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        (fails, ArithmeticError, "only here"),
        (leaves, SplitError, "do not make the same exchanges"),
        (mixes, SplitError, "do not make the same exchanges"),
        (differs, SplitError, "differ in more"),
        (lies, SplitError, r"sizes \[2, 2\], not \[2, 1\]"),
    ],
)
def test_what_ends_with_an_error_ends_at_once(run: Any, error: Any, says: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=says):
        simulate(2, run)
    assert time.monotonic() - start < 20
    assert not [t for t in threading.enumerate() if t.name.startswith("raymod-simulated")]


def test_a_wait_has_a_limit() -> None:
    def sleeps(peers: Peers) -> None:
        if peers.rank == 1:
            time.sleep(1)
        peers.numbers([1])

    with pytest.raises(SplitError, match=r"a rank waited 0\.2 s for the others"):
        simulate(2, sleeps, limit_s=0.2)
