"""Copying and comparing in pieces."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from raymod.transport import bulk
from raymod.transport.bulk import copy_bytes, same_bytes

PIECE = 1 << 20
SIZES = [0, 1, 63, 4096, PIECE - 1, 2 * PIECE, 2 * PIECE + 1, 3 * PIECE + 4095, 9 * PIECE + 77]
EDGE = 128


@pytest.fixture(autouse=True)
def three_helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever machine this is."""
    monkeypatch.setattr(bulk, "_helpers", lambda: 3)
    bulk._pool.cache_clear()
    yield
    bulk._pool.cache_clear()


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_all_bytes_are_copied_and_no_others(nbytes: int) -> None:
    source, target = random_bytes(nbytes), random_bytes(nbytes + 2 * EDGE)
    before = target.clone()
    copy_bytes(source.data_ptr(), target.data_ptr() + EDGE, nbytes)
    assert torch.equal(target[EDGE : EDGE + nbytes], source)
    assert torch.equal(target[:EDGE], before[:EDGE])
    assert torch.equal(target[EDGE + nbytes :], before[EDGE + nbytes :])


@pytest.mark.parametrize("nbytes", SIZES)
def test_one_bit_anywhere_makes_a_difference(nbytes: int) -> None:
    one = random_bytes(nbytes)
    other = one.clone()
    assert same_bytes(one.data_ptr(), other.data_ptr(), nbytes)
    quarter = nbytes // 4
    for at in {0, quarter - 1, quarter, quarter + 64, nbytes // 2, nbytes - 1}:
        if 0 <= at < nbytes:
            other[at] ^= 1
            assert not same_bytes(one.data_ptr(), other.data_ptr(), nbytes), at
            other[at] ^= 1


def test_large_pieces_are_done_by_several_threads() -> None:
    seen: list[str] = []
    together = threading.Barrier(4, timeout=10)

    def do(at: int, size: int) -> int:
        together.wait()  # passes only if all four are under way at once
        seen.append(threading.current_thread().name)
        return size

    assert sum(bulk._each_piece(do, 8 * PIECE)) == 8 * PIECE
    assert len(set(seen)) == 4


def test_nothing_is_under_way_after_an_interrupt() -> None:
    """Else it would write over what is sent next."""
    ended: list[int] = []

    def do(at: int, size: int) -> None:
        if at == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        ended.append(at)

    with pytest.raises(KeyboardInterrupt):
        bulk._each_piece(do, 8 * PIECE)
    assert len(ended) == 3


def test_a_fork_has_helpers_of_its_own() -> None:
    one, other = random_bytes(4 * PIECE), torch.zeros(4 * PIECE, dtype=torch.uint8)
    copy_bytes(one.data_ptr(), other.data_ptr(), one.nbytes)
    pid = os.fork()
    if pid == 0:
        other.numpy().fill(0)  # torch's own threads are not there in a fork
        copy_bytes(one.data_ptr(), other.data_ptr(), one.nbytes)
        os._exit(0 if (one.numpy() == other.numpy()).all() else 1)
    deadline = time.monotonic() + 20
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if found[0] == 0:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert found == (pid, 0)
