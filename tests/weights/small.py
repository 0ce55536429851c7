"""A small diffusers model with everything that a checkpoint can get wrong, and its folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from safetensors.torch import save_file, save_model
from torch import nn

DTYPE = torch.bfloat16


class Small(ModelMixin, ConfigMixin):
    """In bf16 with norms kept in fp32, a tied weight, and buffers that are saved or not."""

    _keep_in_fp32_modules = ["norm"]  # noqa: RUF012 - as diffusers has it

    @register_to_config
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("rope", torch.arange(width).double().cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.norm(x.float()).to(x.dtype) * self.rope.to(x.dtype) * self.scale
        return self.last(x) + self.steps.sum().to(x.dtype)


def small() -> Small:
    """One with random values, in its dtypes."""
    torch.manual_seed(3)
    module = Small()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        module.steps.copy_(torch.tensor([1, 2, 3]))
    return _in_its_dtypes(module)


def save(module: Small, folder: Path, *, sharded: bool = False) -> Path:
    """The folder of a checkpoint; a tied weight is in it once."""
    folder.mkdir(parents=True, exist_ok=True)
    module.save_config(folder)
    name = folder / "diffusion_pytorch_model.safetensors"
    if not sharded:
        save_model(module, str(name))
        return folder
    state = {key: value for key, value in module.state_dict().items() if key != "last.weight"}
    parts = {f"part-{index}.safetensors": list(state)[index::2] for index in range(2)}
    for part, keys in parts.items():
        save_file({key: state[key] for key in keys}, folder / part)
    where = {key: part for part, keys in parts.items() for key in keys}
    index = folder / f"{name.name}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def load_plainly(folder: str) -> Small:
    """What a user's own loader would do."""
    from safetensors.torch import load_model

    module = _in_its_dtypes(Small())
    load_model(module, f"{folder}/diffusion_pytorch_model.safetensors")
    return module


def _in_its_dtypes(module: Small) -> Small:
    rope = module.rope
    nn.Module.to(module, DTYPE)
    module.norm.float()
    module.rope = rope
    return module.eval()
