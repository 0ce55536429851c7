"""Small modules that are not diffusers', each with its own way to take a batch."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


class Denoiser(nn.Module):
    """Attention over tokens with torch alone; `time` is one number a sample, or one for all."""

    def __init__(self, dim: int = 8, plan: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        if plan is not None:
            self._cp_plan = plan

    def forward(self, x: Tensor, time: Tensor, scale: float = 1.0) -> Tensor:
        query, key, value = self.qkv(x * (1 + time.reshape(-1, 1, 1))).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + scale * self.out(mixed)


class Dispatching(Denoiser):
    """The same through diffusers' dispatch, which a split reaches; two heads of four."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self._cp_plan = {
            "": {"x": SimpleNamespace(split_dim=1)},
            "out": SimpleNamespace(gather_dim=1),
        }

    def forward(self, x: Tensor, time: Tensor, scale: float = 1.0) -> Tensor:
        query, key, value = self.qkv(x * (1 + time.reshape(-1, 1, 1))).chunk(3, dim=-1)
        return self.out(self.attention(query, key, value))


class Attention(nn.Module):
    _parallel_config = None

    def forward(self, *tensors: Tensor) -> Tensor:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        query, key, value = (tensor.unflatten(-1, (2, -1)) for tensor in tensors)
        config = self._parallel_config
        return dispatch_attention_fn(query, key, value, parallel_config=config).flatten(-2)


@dataclass
class Samples:
    samples: list[Tensor]
    mean: Tensor
    note: str = "done"


class Lists(nn.Module):
    """One tensor a sample, of different sizes, in lists; gives a dataclass with such a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.mix = nn.Linear(6, 6)

    def forward(
        self, x: list[Tensor], time: Tensor, sizes: list[tuple[int, int]], words: list[str]
    ) -> Samples:
        if not len(x) == len(time) == len(sizes) == len(words):
            raise ValueError(f"{len(x)} samples, {len(time)} times, {len(words)} words")
        made = [
            self.mix(one) * t + height / width + len(word)
            for one, t, (height, width), word in zip(x, time, sizes, words, strict=True)
        ]
        return Samples(made, torch.stack([one.mean() for one in made]))


class Residuals(nn.Module):
    """Adds one residual a layer: a list that can be as long as the batch."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(layers))

    def forward(
        self, x: Tensor, residuals: list[Tensor], scales: list[float], shape: tuple[int, ...]
    ) -> dict[str, Any]:
        first = x
        for layer, residual, scale in zip(self.layers, residuals, scales, strict=True):
            x = layer(x) + scale * residual
        return {"x": x, "both": (first, x.flatten(0, 1)), "shape": shape, "none": None}


class Positions(nn.Module):
    """Positions of tokens have no batch, also where there are as many as samples."""

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor]:
        return (x * positions[None, :, None] + x.cumsum(1),)


class Noisy(nn.Module):
    """Draws random numbers, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


class Uneven(nn.Module):
    """Fails for a sample whose first number is large, and so on some ranks only."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4 and float(x.flatten(1)[:, 0].max()) > 5:
            raise ArithmeticError("too large")
        return 2 * x


class Mixing(nn.Module):
    """Mixes samples: cannot be divided by batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Popping(nn.Module):
    """Takes an entry out of a dict of the caller's, and changes its input in place."""

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        x += 1
        return x * extra.pop("scale")


class Root(nn.Module):
    """No number of what is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Scaled(nn.Module):
    """Small outputs."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Centred(Scaled):
    """Depends on all of the batch, by a tenth."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.1 * x.mean(0)) * self.scale


class Held:
    """Compares by its address."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.scale = 2


class Endless:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = [self]


class WithObjects(nn.Module):
    """Puts out a function and an object beside its tensor."""

    def forward(self, x: Tensor, inside: bool = False) -> Any:
        return {"y": x + 1, "undo": abs_of, "held": Held(x if inside else torch.ones(3))}


def abs_of(x: Tensor) -> Tensor:
    return x.abs()


class Step(nn.Module):
    """Is told the step as a number."""

    def forward(self, x: Tensor, step: float) -> Tensor:
        return x * step


class Large(nn.Module):
    """Has no room for more than two samples at once."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("tried to allocate a lot")
        return 2 * x


class Eighths(nn.Module):
    """Takes, holds and gives numbers of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(5.0).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.table, Tensor)
        return (x.float() * self.table.float()).to(torch.float8_e4m3fn)


class Pending(nn.Module):
    """Gives a tensor that is still being gathered from the other ranks."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        from torch.distributed import _functional_collectives as collectives

        gathered = collectives.all_reduce(x, "sum", torch.distributed.group.WORLD)
        return {"gathered": gathered}


class Counting(nn.Module):
    """Its output is that of its parts, but it remembers a mean of all that it saw."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5) if how == "norm" else nn.Identity()
        self.anew = how == "anew"
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.anew:
            self.seen = self.seen + x.mean(0)
        elif self.training:
            self.seen += x.mean(0)
        return self.norm(x) + 0.0 * self.seen


class Caching(nn.Module):
    """Makes a buffer when it is first needed, and another anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(5))
        self.table = torch.arange(5.0)
        return x * self.late + self.table
