"""Which of a module's weights are still, byte for byte, what a file holds.

diffusers and safetensors map a checkpoint instead of reading it: a weight that was loaded without
a change of dtype is a page of the file until somebody writes to it, which gives the page a private
copy. The kernel keeps that account (`/proc/self/pagemap`), so no byte has to be compared. Where
there is no such account (not Linux, a sandbox), nothing is found.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raymod.calls import TensorMeta
from raymod.weights.checkpoint import FileRef, Stored, refer_to
from raymod.weights.files import map_privately
from raymod.weights.local import named_weights

__all__ = ["files_of", "unmodified"]

# bits of an entry of pagemap
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1) << np.uint64(bit) for bit in (63, 62, 61))


@dataclass(frozen=True)
class _Region:
    """A private mapping of a file into this process."""

    start: int
    end: int
    offset: int
    file: tuple[str, str]
    path: str


def unmodified(module: nn.Module) -> dict[int, Stored]:
    """The weights whose bytes are those of a file, and where they stand in it, by `id`.

    Only what is certain: a weight that shares a page with a changed one is left out.
    """
    regions = _regions()
    refs: dict[tuple[str, str], FileRef | None] = {}
    found = {}
    try:
        pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        for _, tensor, _, _ in named_weights(module):
            region = _region_of(tensor, regions)
            if region is None or id(tensor) in found or not _is_clean(pages, tensor):
                continue
            if region.file not in refs:
                refs[region.file] = _same_file(region)
            ref = refs[region.file]
            if ref is not None:
                offset = region.offset + tensor.data_ptr() - region.start
                found[id(tensor)] = Stored(ref, offset, TensorMeta.of(tensor))
    except OSError:
        return {}
    finally:
        os.close(pages)
    return found


def files_of(module: nn.Module) -> list[str]:
    """The files that the module's weights are mapped from, changed since or not."""
    regions = _regions()
    found = (_region_of(tensor, regions) for _, tensor, _, _ in named_weights(module))
    return sorted({region.path for region in found if region is not None})


def _regions() -> list[_Region]:
    """All private mappings of files, in the order of their addresses."""
    try:
        with open("/proc/self/maps") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    regions = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1][3] == "p" and fields[5].startswith("/"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            regions.append(
                _Region(start, end, int(fields[2], 16), (fields[3], fields[4]), fields[5])
            )
    return sorted(regions, key=lambda region: region.start)


def _region_of(tensor: torch.Tensor, regions: Sequence[_Region]) -> _Region | None:
    if not (type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"):
        return None
    if not (tensor.layout is torch.strided and tensor.is_contiguous() and tensor.nbytes):
        return None
    start = tensor.data_ptr()
    index = bisect_right(regions, start, key=lambda region: region.start) - 1
    if index < 0 or start + tensor.nbytes > regions[index].end:
        return None
    return regions[index]


def _is_clean(pagemap: int, tensor: torch.Tensor) -> bool:
    """Whether none of its pages has been written to."""
    start, entry = tensor.data_ptr(), struct.calcsize("Q")
    first, last = start // mmap.PAGESIZE, (start + tensor.nbytes - 1) // mmap.PAGESIZE
    length = (last - first + 1) * entry
    data = os.pread(pagemap, length, first * entry)
    if len(data) != length:
        return False
    pages = np.frombuffer(data, np.uint64)
    own = ((pages & (_PRESENT | _SWAPPED)) != 0) & ((pages & _OF_FILE) == 0)
    return not own.any()


def _same_file(region: _Region) -> FileRef | None:
    """A reference to the file of a mapping, if it still has that path."""
    try:
        ref = refer_to(region.path, stamped=True)
        fd = os.open(region.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = map_privately(fd, ref.size)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    # the system's own names of the two, which on some file systems are not those of stat()
    other = _region_of(data, _regions())
    return ref if other is not None and other.file == region.file else None
