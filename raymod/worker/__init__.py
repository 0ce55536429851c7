"""What one rank does, as a plain class; only the gang makes it an actor."""

from raymod.worker.core import Health, RankInfo, Reply, Worker
from raymod.worker.host import versions

__all__ = ["Health", "RankInfo", "Reply", "Worker", "versions"]
