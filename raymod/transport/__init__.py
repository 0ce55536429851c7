"""How the bytes of a call reach the ranks and come back."""

from raymod.transport.base import Parcel, Transport
from raymod.transport.store import RayTransport

__all__ = ["Parcel", "RayTransport", "Transport"]
