"""What a call is packed into, and how it becomes a call again. Pure: no Ray, no processes."""

from raymod.calls.joining import Join, find_join, guess_join, join, take
from raymod.calls.packing import (
    Packed,
    TensorMeta,
    bytes_of,
    describe,
    pack,
    tensor_from,
    unpack,
)

__all__ = [
    "Join",
    "Packed",
    "TensorMeta",
    "bytes_of",
    "describe",
    "find_join",
    "guess_join",
    "join",
    "pack",
    "take",
    "tensor_from",
    "unpack",
]
