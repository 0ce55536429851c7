"""How the bytes of a call reach the ranks and come back.

`RayTransport` works on every cluster; `SharedTransport` between processes of one node that can
open one another's files.
"""

from raymod.transport.base import Parcel, Transport
from raymod.transport.segments import CannotOpenError
from raymod.transport.shared import SharedTransport
from raymod.transport.store import RayTransport

__all__ = ["CannotOpenError", "Parcel", "RayTransport", "SharedTransport", "Transport"]
