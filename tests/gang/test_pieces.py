"""How large the pieces are in which weights go through Ray's object stores."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from raymod.gang.deliver import _piece_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("stores", "piece"),
    [
        ([8 << 30], 256 * MIB),
        ([8 << 30, 200 * MIB], 50 * MIB),
        ([8 << 30, 0, 80 * MIB], 20 * MIB),  # a node without a store takes no part
        ([1000], MIB),
        ([], 256 * MIB),
    ],
)
def test_every_store_has_room_for_a_piece(
    stores: list[int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: list[Any] = [
        {"Resources": {"object_store_memory": float(size)} if size else {}} for size in stores
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert _piece_bytes() == piece
