"""A placement group and its actors: started all or none, asked together, ended together."""

from raymod.gang.core import Gang
from raymod.gang.reports import CallReport, GangReport
from raymod.gang.start import Undecided, default_world_size

__all__ = ["CallReport", "Gang", "GangReport", "Undecided", "default_world_size"]
