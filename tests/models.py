"""Tiny transformers of five diffusers families, and inputs for them.

Each function gives `(module, make_inputs)`. Keyword arguments override the config; every parameter
is random, also those that are zero when fresh (gates, modulations), so that no part of a model is
hidden from a comparison. `make_inputs(batch, ...)` gives the keyword arguments of one call; all
sizes differ from one another (batch, image tokens, text tokens, heads, channels), and so do the
samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]
Made = tuple[nn.Module, Callable[..., Inputs]]


def flux(*, seed: int = 0, **overrides: Any) -> Made:
    """FluxTransformer2DModel, guidance included; 35 image and 11 text tokens by default."""
    from diffusers import FluxTransformer2DModel

    config: dict[str, Any] = {
        "in_channels": 12,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 20,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    } | overrides
    module = _made(FluxTransformer2DModel, config, seed)

    def make_inputs(
        batch: int = 1,
        *,
        image: tuple[int, int] = (5, 7),
        text: int = 11,
        seed: int = 1,
        return_dict: bool = False,
    ) -> Inputs:
        with _seeded(seed):
            inputs: Inputs = {
                "hidden_states": torch.randn(batch, image[0] * image[1], config["in_channels"]),
                "encoder_hidden_states": torch.randn(batch, text, config["joint_attention_dim"]),
                "pooled_projections": torch.randn(batch, config["pooled_projection_dim"]),
                "timestep": torch.rand(batch),
                "img_ids": _grid(1, *image),
                "txt_ids": torch.zeros(text, 3),
                "return_dict": return_dict,
            }
            if config["guidance_embeds"]:
                inputs["guidance"] = 1 + torch.rand(batch)
        return inputs

    return module, make_inputs


def flux2(*, seed: int = 0, **overrides: Any) -> Made:
    """Flux2Transformer2DModel; 35 image and 11 text tokens by default."""
    from diffusers import Flux2Transformer2DModel

    config: dict[str, Any] = {
        "in_channels": 12,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 24,
        "timestep_guidance_channels": 32,
        "mlp_ratio": 2.0,
        "axes_dims_rope": (4, 4, 4, 4),
    } | overrides
    module = _made(Flux2Transformer2DModel, config, seed)

    def make_inputs(
        batch: int = 1,
        *,
        image: tuple[int, int] = (5, 7),
        text: int = 11,
        seed: int = 1,
        return_dict: bool = False,
    ) -> Inputs:
        image_ids = torch.cat([_grid(1, *image), torch.zeros(image[0] * image[1], 1)], dim=1)
        text_ids = torch.zeros(text, 4)
        text_ids[:, 3] = torch.arange(text)
        with _seeded(seed):
            return {
                "hidden_states": torch.randn(batch, image[0] * image[1], config["in_channels"]),
                "encoder_hidden_states": torch.randn(batch, text, config["joint_attention_dim"]),
                "timestep": torch.rand(batch),
                "img_ids": image_ids.expand(batch, -1, -1).clone(),
                "txt_ids": text_ids.expand(batch, -1, -1).clone(),
                "guidance": 1 + torch.rand(batch),
                "return_dict": return_dict,
            }

    return module, make_inputs


def wan(*, image_conditioned: bool = False, seed: int = 0, **overrides: Any) -> Made:
    """WanTransformer3DModel, text to video or with image conditioning; 45 tokens by default."""
    from diffusers import WanTransformer3DModel

    config: dict[str, Any] = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 5,
        "out_channels": 3,
        "text_dim": 24,
        "freq_dim": 32,
        "ffn_dim": 96,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    if image_conditioned:
        heads = overrides.get("num_attention_heads", config["num_attention_heads"])
        head_dim = overrides.get("attention_head_dim", config["attention_head_dim"])
        config |= {"image_dim": 20, "added_kv_proj_dim": heads * head_dim}
    config |= overrides
    module = _made(WanTransformer3DModel, config, seed)

    def make_inputs(
        batch: int = 1,
        *,
        video: tuple[int, int, int] = (3, 6, 10),
        text: int | None = None,
        image_tokens: int = 9,
        per_token_timestep: bool = False,
        seed: int = 1,
        return_dict: bool = False,
    ) -> Inputs:
        # The model takes all but the last 512 tokens for those of the image.
        text = text or (512 if image_conditioned else 11)
        frames, height, width = video
        with _seeded(seed):
            timestep = torch.randint(1, 1000, (batch,))
            if per_token_timestep:
                tokens = frames * (height // 2) * (width // 2)
                timestep = torch.randint(1, 1000, (batch, tokens))
            inputs: Inputs = {
                "hidden_states": torch.randn(batch, config["in_channels"], *video),
                "timestep": timestep,
                "encoder_hidden_states": torch.randn(batch, text, config["text_dim"]),
                "return_dict": return_dict,
            }
            if image_conditioned:
                shape = (batch, image_tokens, config["image_dim"])
                inputs["encoder_hidden_states_image"] = torch.randn(shape)
        return inputs

    return module, make_inputs


def qwenimage(*, seed: int = 0, **overrides: Any) -> Made:
    """QwenImageTransformer2DModel; 35 image and 11 text tokens by default."""
    from diffusers import QwenImageTransformer2DModel

    config: dict[str, Any] = {
        "in_channels": 12,
        "out_channels": 3,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 24,
        "axes_dims_rope": (4, 6, 6),
    } | overrides
    module = _made(QwenImageTransformer2DModel, config, seed)

    def make_inputs(
        batch: int = 1,
        *,
        image: tuple[int, int] = (5, 7),
        text: int = 11,
        mask: str = "padded",
        seed: int = 1,
        return_dict: bool = False,
    ) -> Inputs:
        with _seeded(seed):
            return {
                "hidden_states": torch.randn(batch, image[0] * image[1], config["in_channels"]),
                "encoder_hidden_states": torch.randn(batch, text, config["joint_attention_dim"]),
                "encoder_hidden_states_mask": _text_mask(batch, text, mask),
                "timestep": torch.rand(batch),
                "img_shapes": [[(1, *image)]] * batch,
                "return_dict": return_dict,
            }

    return module, make_inputs


def ltx(*, seed: int = 0, **overrides: Any) -> Made:
    """LTXVideoTransformer3DModel; 45 video and 11 text tokens by default."""
    from diffusers import LTXVideoTransformer3DModel

    config: dict[str, Any] = {
        "in_channels": 12,
        "out_channels": 12,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": 2,
        "caption_channels": 24,
    } | overrides
    inner = config["num_attention_heads"] * config["attention_head_dim"]
    config.setdefault("cross_attention_dim", inner)
    module = _made(LTXVideoTransformer3DModel, config, seed)

    def make_inputs(
        batch: int = 1,
        *,
        video: tuple[int, int, int] = (3, 3, 5),
        text: int = 11,
        mask: str = "padded",
        seed: int = 1,
        return_dict: bool = False,
    ) -> Inputs:
        frames, height, width = video
        with _seeded(seed):
            text_mask = _text_mask(batch, text, mask)
            return {
                "hidden_states": torch.randn(batch, frames * height * width, config["in_channels"]),
                "encoder_hidden_states": torch.randn(batch, text, config["caption_channels"]),
                "timestep": torch.randint(1, 1000, (batch,)),
                "encoder_attention_mask": text_mask,
                "num_frames": frames,
                "height": height,
                "width": width,
                "rope_interpolation_scale": (0.32, 32.0, 32.0),
                "return_dict": return_dict,
            }

    return module, make_inputs


FAMILIES: dict[str, Callable[..., Made]] = {
    "flux": flux,
    "flux2": flux2,
    "wan": wan,
    "qwenimage": qwenimage,
    "ltx": ltx,
}

# A module that each family's image tokens pass, as its first argument.
ATTENTIONS = {
    "flux": "transformer_blocks.0.attn",
    "flux2": "transformer_blocks.0.attn",
    "wan": "blocks.0.attn1",
    "qwenimage": "transformer_blocks.0.attn",
    "ltx": "transformer_blocks.0.attn1",
}


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter anew, so that no gate is zero and no norm the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.numel():
                continue
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                values = middle + 0.2 * values
            elif name.endswith("table"):
                values = 0.5 * values
            else:
                values = values / parameter[0].numel() ** 0.5
            parameter.copy_(values)
    return module


def _made(cls: type[nn.Module], config: dict[str, Any], seed: int) -> nn.Module:
    with _seeded(seed):
        module = cls(**config)
    return randomise(module, seed).eval()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` without moving the caller's own random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _grid(frames: int, height: int, width: int) -> torch.Tensor:
    """Positions `(frame, row, column)` of all tokens, float, shape `[tokens, 3]`."""
    axes = (torch.arange(frames), torch.arange(height), torch.arange(width))
    return torch.cartesian_prod(*axes).float()


def _text_mask(batch: int, text: int, kind: str) -> torch.Tensor | None:
    """None, all ones, or one to a few padded tokens at the end, different for each sample."""
    if kind == "none":
        return None
    mask = torch.ones(batch, text, dtype=torch.long)
    if kind == "padded":
        for sample in range(batch):
            mask[sample, text - 2 - sample % 3 :] = 0
    elif kind != "ones":
        raise ValueError(f"mask={kind!r} is none of: none, ones, padded")
    return mask
