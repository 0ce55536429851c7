"""Home-made modules for the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Wrapped:
    value: torch.Tensor
    label: str


class Echo(nn.Module):
    """Gives back what it gets, doubled where it is a tensor of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._double((args, kwargs))

    def _double(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value * self.factor.to(value.dtype) if value.is_floating_point() else value
        if isinstance(value, Wrapped):
            return Wrapped(self._double(value.value), value.label)
        if isinstance(value, dict):
            return {key: self._double(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._double(item) for item in value)
        return value


class Denoiser(nn.Module):
    """A denoiser that knows nothing of diffusers: (B, N, C) and (B,) to (B, N, C)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(channels, channels)
        self.outer = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.inner.in_features:
            raise ValueError(f"expected {self.inner.in_features} channels")
        attended = nn.functional.scaled_dot_product_attention(x, self.inner(x), x)
        return self.outer(attended) * t[:, None, None]


def load_denoiser() -> Denoiser:
    """The same on every rank, in bf16 but for a part, with a buffer that is not saved."""
    torch.manual_seed(3)
    module = Denoiser().bfloat16()
    module.outer.float()
    module.register_buffer("table", torch.arange(5.0), persistent=False)
    return module.eval()
