"""Random sequences of what people do to a transformer, valid by construction."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests import models

Step = tuple[str, Callable[[Any], Any]]

NAMES = ("a", "b", "c")
LAYERS = ("to_q", "to_v", "to_out.0", "proj_out", "x_embedder", "proj_mlp", "net.2")


def lora(
    module: nn.Module,
    seed: int,
    *,
    rank: int = 3,
    prefix: str = "transformer.",
    layers: tuple[str, ...] = LAYERS,
) -> dict[str, torch.Tensor]:
    """A LoRA for `module`, large enough to be seen in its output."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and name.endswith(layers):
            down = torch.randn(rank, part.in_features, generator=generator)
            up = torch.randn(part.out_features, rank, generator=generator)
            weights[f"{prefix}{name}.lora_A.weight"] = 0.3 * down
            weights[f"{prefix}{name}.lora_B.weight"] = 0.3 * up
    return weights


class Sequence:
    """Draws steps; knows what is loaded, so that each of them is possible."""

    def __init__(self, seed: int, make: Callable[[], nn.Module]) -> None:
        self.random = random.Random(seed)
        self._plain = make()
        self._loaded: list[str] = []
        self._is_fused = False
        self._is_qkv_fused = False

    def steps(self, count: int) -> list[Step]:
        """`count` steps, each a name and what is done to a module, local or a stub."""
        return [self._draw() for _ in range(count)]

    def _draw(self) -> Step:
        possible = [self.load, self.mode, self.attribute, self.norms, self.dtype]
        if self._loaded and not self._is_fused:
            possible += [self.set_one, self.set_several, self.off_and_on, self.hotswap]
            possible += [self.fuse, self.fuse, self.delete, self.unload]
        if self._is_fused:
            possible = [self.unfuse, self.unfuse_by_layer, self.mode, self.attribute]
        if not self._loaded:
            possible += [self.qkv, self.processor]
        if self._is_qkv_fused:
            possible = [self.qkv, self.mode]
        return self.random.choice(possible)()

    # -- adapters --

    def load(self) -> Step:
        free = [name for name in NAMES if name not in self._loaded]
        if not free or self._is_fused:
            return self.mode()
        name, weights = free[0], self._weights()
        self._loaded.append(name)
        return f"load {name}", lambda m: m.load_lora_adapter(weights, adapter_name=name)

    def hotswap(self) -> Step:
        name, weights = self.random.choice(self._loaded), self._weights()
        return (
            f"hotswap {name}",
            lambda m: m.load_lora_adapter(weights, adapter_name=name, hotswap=True),
        )

    def set_one(self) -> Step:
        name, weight = self.random.choice(self._loaded), self.random.uniform(0.2, 1.5)
        return f"set {name} to {weight:.2f}", lambda m: m.set_adapters(name, weight)

    def set_several(self) -> Step:
        names = self.random.sample(self._loaded, self.random.randint(1, len(self._loaded)))
        weights = [self.random.uniform(0.2, 1.5) for _ in names]
        return f"set {names}", lambda m: m.set_adapters(names, weights)

    def off_and_on(self) -> Step:
        if self.random.random() < 0.5:
            return "disable", lambda m: m.disable_lora()
        return "enable", lambda m: m.enable_lora()

    def fuse(self) -> Step:
        self._is_fused = True
        scale = self.random.choice([1.0, 0.7])
        return f"fuse {scale}", lambda m: (m.enable_lora(), m.fuse_lora(lora_scale=scale))

    def unfuse(self) -> Step:
        self._is_fused = False
        return "unfuse", lambda m: m.unfuse_lora()

    def unfuse_by_layer(self) -> Step:
        """As a pipeline's `unfuse_lora` does."""
        self._is_fused = False
        return "unfuse by layer", unmerge_all

    def delete(self) -> Step:
        name = self.random.choice(self._loaded)
        self._loaded.remove(name)
        if not self._loaded:
            return self._unloaded()
        return f"delete {name}", lambda m: m.delete_adapters(name)

    def unload(self) -> Step:
        self._loaded.clear()
        return self._unloaded()

    def _unloaded(self) -> Step:
        return "unload", lambda m: m.unload_lora()

    # -- the rest --

    def mode(self) -> Step:
        mode = self.random.random() < 0.5
        return f"train({mode})", lambda m: m.train(mode)

    def attribute(self) -> Step:
        value = self.random.randint(1, 100)
        return f"noted = {value}", lambda m: setattr(m, "noted", value)

    def norms(self) -> Step:
        name = "x_embedder.base_layer.bias" if self._loaded else "x_embedder.bias"
        value = torch.randn(64, generator=torch.Generator().manual_seed(self._number()))
        return "load the bias", lambda m: m.load_state_dict({name: value}, strict=False)

    def dtype(self) -> Step:
        return "double and back", lambda m: m.to(torch.float64).to(torch.float32)

    def qkv(self) -> Step:
        self._is_qkv_fused = not self._is_qkv_fused
        if self._is_qkv_fused:
            return "fuse qkv", lambda m: m.fuse_qkv_projections()
        return "unfuse qkv", lambda m: m.unfuse_qkv_projections()

    def processor(self) -> Step:
        from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

        return "set processor", lambda m: m.set_attn_processor(FluxAttnProcessor())

    def _weights(self) -> dict[str, torch.Tensor]:
        return lora(self._plain, self._number())

    def _number(self) -> int:
        return self.random.randint(0, 10**6)


def unmerge_all(module: Any) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.unmerge()


def flux() -> nn.Module:
    """The model that the sequences are for."""
    return models.flux()[0].eval()
