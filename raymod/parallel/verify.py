"""Comparing what a split model puts out with what the whole one does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from raymod.calls import bytes_of
from raymod.calls.modes import modes
from raymod.calls.trees import Path, hidden_items, items, same, tensors

__all__ = ["Difference", "difference", "equal_bytes", "is_all_broken", "limit_for"]

LIMIT = 1e-4
LIMIT_16_BIT = 3e-2
LIMIT_8_BIT = 0.15  # neighbours of the largest numbers are an eighth of them apart

# Two numbers of 4 bits in a byte, which torch can only carry.
_PAIRS = {getattr(torch, "float4_e2m1fn_x2", None)}

# A tensor that is smaller than this part of the largest one may be mere rounding of it, such as
# the mean of what was normalised.
NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class Difference:
    """The largest difference between two outputs.

    Attributes:
        value: Relative to the largest finite entry of the tensor, or to `NEGLIGIBLE` of the whole
            output's largest one; infinite where types, shapes or plain values differ, or entries
            that are no finite number.
        where: What differs, in words; empty where nothing does.
    """

    value: float = 0.0
    where: str = ""


def limit_for(module: nn.Module, output: Any) -> float:
    """The largest difference that rounding may make, for the lowest precision in use."""
    seen = {p.dtype for p in module.parameters()} | {t.dtype for t in tensors(output)}
    seen |= {dtype for _, dtype, _ in modes().get("autocast", ())}
    if any(tensor.is_floating_point() and tensor.element_size() < 2 for tensor in tensors(output)):
        return LIMIT_8_BIT
    low = any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in seen)
    return LIMIT_16_BIT if low or _rounds_inside(output) else LIMIT


def _rounds_inside(output: Any) -> bool:
    """Whether products in fp32 are computed with fewer bits, as TF32 does."""
    on_gpu = any(tensor.is_cuda for tensor in tensors(output))
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
        return not exact or (on_gpu and torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the settings say different things for different operators
        return True


def is_all_broken(output: Any) -> bool:
    """Whether there are numbers in `output`, and none of them is finite."""
    found = [tensor for tensor in tensors(output) if _is_inexact(tensor) and tensor.numel()]
    return bool(found) and not any(bool(torch.isfinite(_wide(t)).any()) for t in found)


def difference(whole: Any, split: Any) -> Difference:
    """The largest difference between the whole model's output and the split one's.

    What the whole model itself makes infinite or no number must be the same in the split one's. Of
    objects that only compare by their address, what they hold is compared; the rest is left out.
    """
    largest = max((_largest(tensor) for tensor in tensors(whole)), default=0.0)
    return _Comparison(NEGLIGIBLE * largest).of(whole, split, ())


class _Comparison:
    """One comparison of two outputs."""

    def __init__(self, least_scale: float) -> None:
        self._least_scale = least_scale
        self._seen: set[int] = set()

    def of(self, whole: Any, split: Any, path: Path) -> Difference:
        if type(whole) is not type(split):
            return _broken(path, f"is {type(split).__name__}, not {type(whole).__name__}")
        if isinstance(whole, np.ndarray) and whole.dtype.kind in "biufc":
            whole, split = _as_tensor(whole), _as_tensor(split)
        if isinstance(whole, torch.Tensor):
            return self._of_tensors(whole, split, path)
        inside, others = items(whole), items(split)
        if inside is not None and others is not None:
            return self._of_items(inside, others, path)
        if same(whole, split):
            return Difference()
        inside, others = hidden_items(whole), hidden_items(split)
        if inside is None or others is None:
            return _broken(path, f"is {split!r}, not {whole!r}")
        if id(whole) in self._seen:
            return Difference()
        self._seen.add(id(whole))
        return self._of_items(inside, others, path)

    def _of_items(
        self, inside: Mapping[Any, Any], others: Mapping[Any, Any], path: Path
    ) -> Difference:
        if list(inside) != list(others):
            return _broken(path, f"has {len(others)} items, not {len(inside)}")
        found = [self.of(inside[key], others[key], (*path, key)) for key in inside]
        return max(found, key=lambda one: one.value, default=Difference())

    def _of_tensors(self, whole: torch.Tensor, split: torch.Tensor, path: Path) -> Difference:
        if whole.shape != split.shape:
            return _broken(path, f"has shape {list(split.shape)}, not {list(whole.shape)}")
        if whole.dtype != split.dtype:
            return _broken(path, f"is {split.dtype}, not {whole.dtype}")
        if whole.numel() == 0:
            return Difference()
        if not _is_inexact(whole):
            equal = equal_bytes(whole, split)
            return Difference() if equal else _broken(path, "has other integers")
        one, other = _wide(whole), _wide(split)
        finite = torch.isfinite(one)
        if not torch.equal(finite, torch.isfinite(other)):
            return _broken(path, "is not finite in the same places")
        if not torch.equal(_kinds(one[~finite]), _kinds(other[~finite])):
            return _broken(path, "has other infinities")
        if not bool(finite.any()):
            return Difference()
        apart = float((one - other)[finite].abs().max())
        if apart == 0:
            return Difference()
        scale = max(float(one[finite].abs().max()), self._least_scale)
        if scale == 0:
            return _broken(path, f"is up to {apart:.2g}, not zero")
        return Difference(apart / scale, f"{_name(path)} differs by {apart / scale:.2g}")


def _kinds(values: torch.Tensor) -> torch.Tensor:
    """Values that are not finite, made comparable."""
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return torch.where(torch.isfinite(parts), 0.0, torch.nan_to_num(parts, 2.0, 1.0, -1.0))


def _largest(tensor: torch.Tensor) -> float:
    if not _is_inexact(tensor) or not tensor.numel():
        return 0.0
    sizes = _wide(tensor).abs()
    return float(torch.where(torch.isfinite(sizes), sizes, 0.0).max())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in 64 bits; dtypes of 8 bits can hardly be reckoned with."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are the same to the bit, of any dtype."""
    return torch.equal(bytes_of(one.contiguous()), bytes_of(other.contiguous()))


def _is_inexact(tensor: torch.Tensor) -> bool:
    if tensor.dtype in _PAIRS:
        return False
    return tensor.is_floating_point() or tensor.is_complex()


def _as_tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def _broken(path: Path, how: str) -> Difference:
    return Difference(math.inf, f"{_name(path)} {how}")


def _name(path: Path) -> str:
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "output" + "".join(parts)
