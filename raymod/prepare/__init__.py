"""What a rank does to its module before it serves, always in the same order."""

from raymod.prepare.core import PrepareReport, Share, SplitModule, prepare

__all__ = ["PrepareReport", "Share", "SplitModule", "prepare"]
