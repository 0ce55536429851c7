"""How the ranks are, asked apart from their work."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray

from raymod.gang.ranks import Member, collect
from raymod.worker import Health

__all__ = ["ask_health"]


def ask_health(members: Sequence[Member], timeout_s: float) -> tuple[Health, ...]:
    """How each rank is, also during a call; a rank that does not answer is not `ok`.

    Args:
        members: The ranks.
        timeout_s: Limit in seconds.
    """
    refs = {
        member.actor.health.options(concurrency_group="health").remote(): member
        for member in members
    }
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    found = []
    for ref, member in refs.items():
        health = Health(rank=member.rank, state=f"silent for {timeout_s:g} s", ok=False)
        if ref in ready:
            outcome = collect({ref: member}, deadline=time.monotonic() + 1.0)
            gone = outcome.deaths.get(member.rank, "does not answer")
            health = outcome.replies.get(
                member.rank, Health(rank=member.rank, state=f"gone: {gone}", ok=False)
            )
        found.append(health)
    return tuple(found)
