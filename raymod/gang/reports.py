"""What a gang tells of itself: of its start, and of its last call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raymod.worker import RankInfo

__all__ = ["CallReport", "GangReport"]


@dataclass(frozen=True, kw_only=True)
class GangReport:
    """How a gang was started.

    Attributes:
        ranks: What each rank says of itself, in rank order.
        phases: Seconds of each phase of the start.
        split: What was split, in words.
        warnings: What the user should know.
        near: The ranks that share memory with the driver; the others are called through Ray.
    """

    ranks: tuple[RankInfo, ...]
    phases: Mapping[str, float]
    split: str
    warnings: tuple[str, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CallReport:
    """Where the time and the bytes of one call went.

    Attributes:
        sent_bytes: Size of the arguments that were sent, once for all ranks; twice if some ranks
            share memory with the driver and others do not.
        reused_bytes: Size of those that were there already, from an earlier call.
        returned_bytes: Size of what came back.
        pack_s: Taking the arguments apart.
        send_s: Making them available to the ranks, and asking all ranks.
        compute_s: The work of the slowest rank, from opening the arguments to storing the output.
        reply_s: All else: waking up the ranks and the driver, and putting the output together.
        total_s: The whole call, without waiting for the calls of other threads.
    """

    sent_bytes: int
    reused_bytes: int
    returned_bytes: int
    pack_s: float
    send_s: float
    compute_s: float
    reply_s: float
    total_s: float
