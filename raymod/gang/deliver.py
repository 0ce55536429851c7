"""The weights on their way to the ranks: by file where a rank can open it, else in pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray

from raymod.gang.ranks import Member
from raymod.weights import Offer, Ticket

__all__ = ["deliver"]

logger = logging.getLogger(__name__)

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
    far: dict[str, list[Member]] = {}
    for member, can_load in zip(members, near, strict=True):
        if not can_load:
            far.setdefault(member.spot.node_id, []).append(member)
    if far:
        _send_pieces(offer, list(far.values()), ask)
    here = [member for member, can_load in zip(members, near, strict=True) if can_load]
    if here:
        ask(here, "load", ticket)


def _send_pieces(offer: Offer, nodes: list[list[Member]], ask: Ask) -> None:
    """The bytes go once to each node: one rank takes them, the others open what that one has."""
    receivers = [members[0] for members in nodes]
    logger.info("sending the weights in pieces to %d nodes", len(nodes))
    ask(receivers, "receive", offer.ticket_for_pieces)
    for piece in offer.pieces():
        # a reference as an argument: Ray hands the piece itself to the method
        ask(receivers, "receive_piece", ray.put(piece))
    tickets = ask(receivers, "received")
    for members, own in zip(nodes, tickets, strict=True):
        ask(members, "load", own)
    ask(receivers, "release")
