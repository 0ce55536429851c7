"""Between the memory of this process and that of a GPU.

Pinned memory is what a GPU reads and writes by itself: without that the driver of the GPU copies
all bytes once more. Where pinning fails, everything works as well, and slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

__all__ = ["finish", "pin", "unpin", "upload"]

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs of this process


def pin(memory: torch.Tensor) -> bool:
    """Pin memory until `unpin`, which has to come before it is unmapped.

    Args:
        memory: All of a mapping, as a flat `uint8` tensor.

    Returns:
        Whether it is pinned now.
    """
    if not torch.cuda.is_available():
        return False
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`."""
    with suppress(Exception):  # at the end of the process the runtime may be gone
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(memory.data_ptr())


def upload(parts: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copies of `parts` on a GPU, all there when this returns.

    They go through a stream of their own: what the GPU is doing for others is not waited for.
    """
    stream, user = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copies = tuple(part.to(device, non_blocking=True) for part in parts)
    for copy in copies:
        copy.record_stream(user)  # its memory is not given away while that one uses it
    stream.synchronize()
    return copies


def finish(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for copies from GPUs that were begun with `non_blocking`; once for each GPU."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
