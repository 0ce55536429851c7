"""Weights reach ranks wherever they are: no Ray, and ranks that only tell what they can open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from raymod.gang import deliver as room
from raymod.gang.deliver import deliver
from raymod.gang.placement import Spot
from raymod.gang.ranks import Member

PIECES = ["one", "two", "three"]


class Rank:
    """Opens what was made in its own container, and nothing else."""

    def __init__(self, container: str) -> None:
        self.container = container
        self.taken: list[str] = []
        self.loaded: list[str] = []
        self.receives = False

    def can_load(self, ticket: str) -> bool:
        return ticket == self.container

    def load(self, ticket: str) -> None:
        assert ticket == self.container, "the token does not match"
        self.loaded.append(ticket)

    def receive(self, ticket: str) -> None:
        self.receives = True

    def receive_piece(self, piece: str) -> None:
        assert self.receives
        self.taken.append(piece)

    def received(self) -> str:
        assert self.taken == PIECES
        return self.container

    def release(self) -> None:
        self.receives = False


class PiecesOffer:
    ticket_for_pieces = "pieces"

    def pieces(self, piece_bytes: int) -> Iterator[str]:
        return iter(PIECES)


@pytest.mark.parametrize(
    ("containers", "nodes", "hosts", "receivers"),
    [
        ("dddd", "dddd", "dddd", []),  # all where the driver is
        ("dabb", "dnnn", "dabb", [1, 2]),  # containers of one node, known by their namespaces
        ("aabc", "nnnn", "hhhh", [0, 2, 3]),  # not known, for they say the same
        ("ab", "dd", "ab", [0, 1]),  # beside the driver on its node
        ("abab", "nmnm", "    ", [0, 1]),  # two other nodes
    ],
)
def test_every_rank_loads(
    monkeypatch: pytest.MonkeyPatch, containers: str, nodes: str, hosts: str, receivers: list[int]
) -> None:
    monkeypatch.setattr(room.ray, "put", lambda piece: piece)
    monkeypatch.setattr(room.ray, "nodes", lambda: [])
    ranks = [Rank(container) for container in containers]
    members = [
        Member(
            rank,
            None,
            Spot(slot=rank, node_id=node, node_address="", gpu_ids=(), pid=1, host=host.strip()),
        )
        for rank, (node, host) in enumerate(zip(nodes, hosts, strict=True))
    ]

    def ask(asked: Sequence[Member], method: str, *args: Any) -> list[Any]:
        return [getattr(ranks[member.rank], method)(*args) for member in asked]

    deliver(PiecesOffer(), "d", members, ask)  # type: ignore[arg-type]
    assert [rank.loaded for rank in ranks] == [[rank.container] for rank in ranks]
    assert [number for number, rank in enumerate(ranks) if rank.taken] == receivers
    assert not any(rank.receives for rank in ranks)
