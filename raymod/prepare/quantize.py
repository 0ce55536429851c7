"""Quantizing a rank's weights; the driver's stay what they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from raymod.config import quantize_kind
from raymod.errors import ConfigError

__all__ = ["quantize"]


def quantize(module: nn.Module, config: Any) -> int:
    """Quantize the linear layers of `module` in place.

    Args:
        module: The module, with its weights.
        config: A torchao config, or diffusers' `TorchAoConfig`.

    Returns:
        Number of weights that were changed.

    Raises:
        ConfigError: The config fits none of the module's layers.
        UnsupportedError: The config is of a kind that only works while a checkpoint is loaded.
    """
    quantize_: Any = importlib.import_module("torchao.quantization").quantize_

    skipped: tuple[str, ...] = ()
    if quantize_kind(config) == "diffusers":
        skipped = tuple(config.modules_to_not_convert or ())
        skipped += tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
        config = config.quant_type
    before = {name: type(value) for name, value in module.named_parameters()}
    quantize_(module, config, filter_fn=_filter(skipped))
    changed = [n for n, value in module.named_parameters() if type(value) is not before.get(n)]
    if not changed:
        raise ConfigError(
            f"quantize={type(config).__name__}: no weight of this {type(module).__name__} was "
            f"changed. torchao takes linear layers whose sizes its kernels know."
        )
    return len(changed)


def _filter(skipped: tuple[str, ...]) -> Callable[[nn.Module, str], bool]:
    def wanted(part: nn.Module, name: str) -> bool:
        return isinstance(part, nn.Linear) and not any(f"{one}." in f"{name}." for one in skipped)

    return wanted
