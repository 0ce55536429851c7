"""Starting the ranks of a gang anew after some of them died."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raymod.errors import GangError, RankDiedError
from raymod.gang.progress import Progress
from raymod.gang.start import Asked, Existing, start
from raymod.gang.telling import first_line
from raymod.weights import Offer

__all__ = ["Restarts"]

logger = logging.getLogger(__name__)


@dataclass
class Restarts:
    """What it takes to start a gang's ranks anew.

    Attributes:
        asked: What was asked of the gang.
        again: Offers the weights once more; None: nobody has them but the ranks.
        progress: As for `Gang.start`.
        number: How many times they were started anew; also tells one set of ranks from the next.
        by_itself: How many of these nobody asked for.
    """

    asked: Asked
    again: Callable[[], Offer] | None = None
    progress: Callable[[str], None] | None = None
    number: int = 0
    by_itself: int = 0

    def covers(self, failure: GangError | None) -> bool:
        """Whether the ranks are started anew, by themselves, after this."""
        return (
            isinstance(failure, RankDiedError)
            and self.again is not None
            and self.by_itself < self.asked.config.max_restarts
        )

    def check(self) -> None:
        """Whether it can be done at all.

        Raises:
            GangError: Nobody has the weights any more.
        """
        if self.again is None:
            raise GangError(
                "the ranks cannot be started anew: nobody has the weights but the ranks: "
                "keep_local=False, or a checkpoint that lacks some of them"
            )

    def start(self) -> tuple[Existing, Mapping[str, float]]:
        """New ranks with the weights, and the seconds of each phase.

        Raises:
            GangStartError: They did not become ready; then nothing of them is left.
        """
        assert self.again is not None, "check first"
        with self.again() as load, Progress(self.progress) as steps:
            existing = start(self.asked, load, steps)
        self.number += 1
        return existing, steps.phases

    def tell(self, failure: GangError | None, took: float) -> None:
        """Say what happened, and how many seconds it took."""
        if failure is None:
            logger.info("the ranks were started anew in %.1f s", took)
            return
        logger.warning(
            "%s. The ranks were started anew in %.1f s (%d of max_restarts=%d).",
            first_line(failure).rstrip("."),
            took,
            self.by_itself,
            self.asked.config.max_restarts,
        )
