"""The weights on their way to the ranks: by file where a rank can open it, else in pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray

from raymod.gang.ranks import Member
from raymod.weights import Offer, Ticket
from raymod.weights.offers import PIECE_BYTES

__all__ = ["deliver"]

logger = logging.getLogger(__name__)

# Of an object store a piece takes no more than this part of it: the one before may still be there.
_STORE_SHARE = 4
_LEAST_BYTES = 1 << 20

# Asks members to run a method of their worker; returns the answers in their order.
Ask = Callable[..., list[Any]]


def deliver(offer: Offer, ticket: Ticket, members: Sequence[Member], ask: Ask) -> None:
    """Let every rank load the module.

    Args:
        offer: The weights.
        ticket: Its ticket.
        members: All ranks.
        ask: `ask(members, method, *args)`, with the limit of the start.
    """
    near = ask(members, "can_load", ticket)
    here, far = _parted(members, near)
    while far:
        far = _send_pieces(offer, far, ask)
    if here:
        ask(here, "load", ticket)


def _piece_bytes() -> int:
    """Small enough for every object store: a piece that does not fit would go by way of a disk."""
    stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes()]
    shares = [int(store) // _STORE_SHARE for store in stores if store]
    return max(_LEAST_BYTES, min([PIECE_BYTES, *shares]))


def _send_pieces(offer: Offer, far: Sequence[Member], ask: Ask) -> list[Member]:
    """The bytes go once to each place: one rank takes them, the others open what that one has.

    Returns:
        Members that could not open it: containers on one node share neither processes nor files.
    """
    places: dict[tuple[str, str], list[Member]] = {}
    for member in far:
        places.setdefault((member.spot.node_id, member.spot.host), []).append(member)
    groups = list(places.values())
    receivers = [members[0] for members in groups]
    logger.info("sending the weights in pieces to %d places", len(groups))
    ask(receivers, "receive", offer.ticket_for_pieces)
    for piece in offer.pieces(_piece_bytes()):
        # a reference as an argument: Ray hands the piece itself to the method
        ask(receivers, "receive_piece", ray.put(piece))
    tickets = ask(receivers, "received")
    left: list[Member] = []
    for members, own in zip(groups, tickets, strict=True):
        others = members[1:]
        near, apart = _parted(others, ask(others, "can_load", own) if others else [])
        left += apart
        ask([members[0], *near], "load", own)
    ask(receivers, "release")
    return left


def _parted(members: Sequence[Member], can: Sequence[bool]) -> tuple[list[Member], list[Member]]:
    """Those that can, and those that cannot."""
    pairs = list(zip(members, can, strict=True))
    return [member for member, yes in pairs if yes], [member for member, yes in pairs if not yes]
