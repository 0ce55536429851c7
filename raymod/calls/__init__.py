"""What a call is packed into, and how it becomes a call again. Pure: no Ray, no processes."""

from raymod.calls.packing import (
    Packed,
    TensorMeta,
    bytes_of,
    describe,
    pack,
    tensor_from,
    unpack,
)

__all__ = ["Packed", "TensorMeta", "bytes_of", "describe", "pack", "tensor_from", "unpack"]
