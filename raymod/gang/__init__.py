"""A placement group and its actors: started all or none, asked together, ended together."""

from raymod.gang.core import Gang
from raymod.gang.here import HereGang
from raymod.gang.reports import CallReport, GangReport
from raymod.gang.start import Undecided, default_world_size
from raymod.gang.tenant import Tenant

__all__ = [
    "CallReport",
    "Gang",
    "GangReport",
    "HereGang",
    "Tenant",
    "Undecided",
    "default_world_size",
]
