"""What a rank finds on its machine: device, cores, network interface; and how it keeps quiet."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import platform
import socket
import struct
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from raymod import __version__

__all__ = [
    "choose_device",
    "device_name",
    "interface_of",
    "quiet",
    "rss_bytes",
    "versions",
]

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40  # struct ifreq on 64-bit Linux: 16 bytes of name, then a sockaddr


def choose_device(
    gpu_ids: Sequence[str], environ: Mapping[str, str], gpu_count: int
) -> tuple[torch.device, tuple[str, ...]]:
    """The device of a rank, out of what Ray gave it and what its process sees.

    Args:
        gpu_ids: The GPUs that Ray reserved for it, as Ray names them.
        environ: Its environment; `CUDA_VISIBLE_DEVICES` is read and never written.
        gpu_count: Number of GPUs that torch sees.

    Returns:
        The device, and warnings. Without a GPU of its own a rank runs on the CPU.
    """
    if not gpu_ids:
        return torch.device("cpu"), ()
    if not gpu_count:
        return torch.device("cpu"), (
            f"Ray reserved GPU {', '.join(gpu_ids)}, but torch {torch.__version__} sees no GPU "
            f"there, so the rank runs on the CPU; install a torch build for the GPU on the node",
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else []
    first = gpu_ids[0]
    if first in names:
        index = names.index(first)  # one of one, or of all the node's GPUs
    elif names and len(names) == len(gpu_ids):
        index = 0  # the same GPU under another name (UUID)
    else:
        index = int(first) if first.isdigit() else 0
    if index >= gpu_count:
        return torch.device("cuda", 0), (
            f"Ray reserved GPU {first}, which would be index {index}, but torch sees only "
            f"{gpu_count}; the rank uses index 0",
        )
    return torch.device("cuda", index), ()


def device_name(device: torch.device) -> str:
    """The device's model, for reports."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return platform.processor() or platform.machine()


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None if there is none or it can't be told."""
    with suppress(OSError, AttributeError):
        for name, own in _interfaces():
            if own == address:
                return name
    return None


def _interfaces() -> list[tuple[str, str]]:
    if not sys.platform.startswith("linux"):
        return []
    buffer = array.array("B", bytes(_IFREQ_BYTES * 256))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, request)
    filled = struct.unpack("iL", answer)[0]
    found = []
    for start in range(0, filled, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        found.append((entry[:16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(entry[20:24])))
    return found


def quiet(rank: int) -> None:
    """No progress bars on any rank; libraries and warnings speak on rank 0 only."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for library in ("diffusers", "transformers"):
        # without an import of the library: it costs seconds, and not every module needs it
        os.environ.setdefault(f"{library.upper()}_VERBOSITY", "error" if rank else "warning")
        if rank:
            logging.getLogger(library).setLevel(logging.ERROR)
        _bars_off(library)
    if rank:
        warnings.simplefilter("ignore")
        logging.getLogger("torch").setLevel(logging.ERROR)


def _bars_off(library: str) -> None:
    module = sys.modules.get(f"{library}.utils.logging")
    if module is not None:
        with suppress(AttributeError):
            module.disable_progress_bar()


def rss_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def versions() -> dict[str, str]:
    """Versions that must agree between driver and ranks; "none" for what is not installed."""
    found = {"python": platform.python_version(), "raymod": __version__}
    for package in ("torch", "diffusers", "ray"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found
