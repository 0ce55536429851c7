"""Comparing what a split model puts out with what the whole one does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymod.calls.trees import Path, items, same, tensors

__all__ = ["Difference", "difference", "limit_for"]

LIMIT = 1e-4
LIMIT_16_BIT = 3e-2


@dataclass(frozen=True)
class Difference:
    """The largest difference between two outputs.

    Attributes:
        value: Relative to the largest entry of the whole output, or to 1 where that is larger;
            infinite where types, shapes or plain values differ or something is no number.
        where: What differs, in words; empty where nothing does.
    """

    value: float = 0.0
    where: str = ""


def limit_for(module: nn.Module, output: Any) -> float:
    """The largest difference that rounding may make, for the lowest precision in use."""
    seen = {p.dtype for p in module.parameters()} | {t.dtype for t in tensors(output)}
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


def difference(whole: Any, split: Any) -> Difference:
    """The largest difference between the whole model's output and the split one's."""
    return _differ(whole, split, ())


def _differ(whole: Any, split: Any, path: Path) -> Difference:
    if type(whole) is not type(split):
        return _broken(path, f"is {type(split).__name__}, not {type(whole).__name__}")
    if isinstance(whole, torch.Tensor):
        return _differ_by(whole, split, path)
    inside, others = items(whole), items(split)
    if inside is None or others is None:
        return Difference() if same(whole, split) else _broken(path, f"is {split!r}, not {whole!r}")
    if list(inside) != list(others):
        return _broken(path, f"has {len(others)} items, not {len(inside)}")
    found = [_differ(inside[key], others[key], (*path, key)) for key in inside]
    return max(found, key=lambda one: one.value, default=Difference())


def _differ_by(whole: torch.Tensor, split: torch.Tensor, path: Path) -> Difference:
    if whole.shape != split.shape:
        return _broken(path, f"has shape {list(split.shape)}, not {list(whole.shape)}")
    if whole.dtype != split.dtype:
        return _broken(path, f"is {split.dtype}, not {whole.dtype}")
    if whole.numel() == 0:
        return Difference()
    if not (whole.is_floating_point() or whole.is_complex()):
        equal = torch.equal(whole, split)
        return Difference() if equal else _broken(path, "has other integers")
    wide = torch.complex128 if whole.is_complex() else torch.float64
    one, other = whole.to(wide), split.to(wide)
    if not bool(torch.isfinite(one).all()):
        return _broken(path, "is not finite in the whole model either, so nothing can be compared")
    scale = max(1.0, float(one.abs().max()))
    value = float((one - other).abs().max()) / scale
    if math.isnan(value) or math.isinf(value):
        return _broken(path, "is not finite")
    return Difference(value, f"{_name(path)} differs by {value:.2g}") if value else Difference()


def _broken(path: Path, how: str) -> Difference:
    return Difference(math.inf, f"{_name(path)} {how}")


def _name(path: Path) -> str:
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "output" + "".join(parts)
