"""Flux-like transformers to measure with, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raymod.bench.machine import MB

__all__ = ["inputs", "large", "small"]

_BLOCK_BYTES = 31.5 * MB  # of one single block of the large one, in bf16
_SMALL: dict[str, Any] = {
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "num_layers": 2,
    "num_single_layers": 4,
    "in_channels": 64,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
    "axes_dims_rope": (16, 24, 24),
    "guidance_embeds": True,
}
_LARGE: dict[str, Any] = {
    **_SMALL,
    "attention_head_dim": 128,
    "num_layers": 1,
    "axes_dims_rope": (16, 56, 56),
}


def small(*, blocks: int = 4) -> nn.Module:
    """The one whose steps are timed: width 512, 2 double and 4 single blocks, fp32.

    Args:
        blocks: Number of single blocks.

    Returns:
        The same weights with every call, in every process.
    """
    from diffusers import FluxTransformer2DModel

    flux: Any = FluxTransformer2DModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: nn.Module = flux(**{**_SMALL, "num_single_layers": blocks})
    return made.eval()


def large(megabytes: int) -> nn.Module:
    """A bf16 one of about so many MB of random weights."""
    from diffusers import FluxTransformer2DModel

    flux: Any = FluxTransformer2DModel
    blocks = max(1, round((megabytes * MB - 2.8 * _BLOCK_BYTES) / _BLOCK_BYTES))
    with torch.device("meta"):
        made: nn.Module = flux(**{**_LARGE, "num_single_layers": blocks})
    # diffusers' own `to` has something to say on every cast
    made = nn.Module.to(made, torch.bfloat16).to_empty(device="cpu").eval()
    block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) / 32
    with torch.no_grad():
        for parameter in made.parameters():  # random enough, at the speed of a copy
            flat = parameter.view(-1)
            for at in range(0, flat.numel(), len(block)):
                part = flat[at : at + len(block)]
                part.copy_(block[: len(part)])
    return made


def inputs(
    *, image: tuple[int, int], text: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Keyword arguments of one call, the same in every process.

    Args:
        image: Rows and columns of image tokens.
        text: Number of text tokens.
        dtype: Of what is no position.
    """
    draw = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    rows, columns = image
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)
    return {
        "hidden_states": noise(1, rows * columns, _SMALL["in_channels"]),
        "encoder_hidden_states": noise(1, text, _SMALL["joint_attention_dim"]),
        "pooled_projections": noise(1, _SMALL["pooled_projection_dim"]),
        "timestep": torch.full((1,), 0.5, dtype=dtype),
        "guidance": torch.full((1,), 3.5, dtype=dtype),
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
