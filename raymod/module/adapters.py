"""Loading a LoRA through a stub: what travels, and what of it fits the model."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from raymod.errors import ConfigError

__all__ = ["AdapterReport", "load_lora_adapter"]

logger = logging.getLogger(__name__)

_SHOWN = 3
# What follows the name of the layer in the key of an adapter's weight.
_ENDING = re.compile(r"\.(lora_|lora\.|lokr_|alpha$|dora_scale$|diff$|diff_b$).*$")
_OTHERS = ("text_encoder", "lora_te", "text_model")


@dataclass(frozen=True)
class AdapterReport:
    """What of an adapter's file fitted the model.

    Attributes:
        name: The adapter.
        matched: Number of weights whose layer the model has.
        unmatched: Keys of the others.
        nbytes: What was sent to the ranks, in bytes.
    """

    name: str
    matched: int
    unmatched: tuple[str, ...]
    nbytes: int


def load_lora_adapter(
    self: Any, source: Any, prefix: str | None = "transformer", hotswap: bool = False, **kwargs: Any
) -> None:
    """Load a LoRA on every rank and into the driver's module.

    The file is read here. Only the weights under `prefix` travel. `stub.adapters` then says how
    many of them fitted.

    Args:
        self: The stub.
        source: Path, model id or state dict, as the original takes it.
        prefix: Which of the keys are the model's; they start with it and a dot.
        hotswap: Replace the weights of an adapter that is loaded.
        **kwargs: As the original takes them.

    Raises:
        ConfigError: None of the keys fits the model.
    """
    state = self._open("load a LoRA")
    original = state.original
    kwargs.pop("_pipeline", None)  # offloading is left as it is: nothing here is offloaded
    weights, metadata, rest = _read(source, kwargs)
    start = "" if prefix is None else f"{prefix}."
    ours = {key: value for key, value in weights.items() if key.startswith(start)}
    if not ours and weights and all(key.startswith(_OTHERS) for key in weights):
        logger.info("%s: the LoRA is for other components only", type(self).__name__)
        return
    matched, unmatched = _fitting(original, ours, start)
    if not matched:
        raise ConfigError(_nothing_fits(original, weights, ours, prefix))
    name = rest.pop("adapter_name", None) or _free_name(original)
    self._change(
        "load a LoRA",
        "load_lora_adapter",
        ours,
        prefix=prefix,
        hotswap=hotswap,
        adapter_name=name,
        metadata=metadata,
        options={"group": "adapters"},
        **rest,
    )
    nbytes = sum(value.nbytes for value in ours.values())
    state.adapters[name] = AdapterReport(name, len(matched), tuple(unmatched), nbytes)
    text = f"adapter {name!r}: {len(matched)} of {len(ours)} weights fit {type(self).__name__}"
    logger.info("%s, %d bytes", text, nbytes)
    if unmatched:
        warnings.warn(f"{text}; not {_some(unmatched)}", UserWarning, stacklevel=2)


def _read(source: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """The state dict, its metadata, and what of `kwargs` is not about reading."""
    from diffusers.loaders import lora_base

    fetch: Any = lora_base._fetch_state_dict
    names = inspect.signature(fetch).parameters
    about_reading = {
        **dict.fromkeys(names),
        "user_agent": {"file_type": "attn_procs_weights", "framework": "pytorch"},
        "allow_pickle": False,
        **{name: value for name, value in kwargs.items() if name in names},
    }
    about_reading.pop("pretrained_model_name_or_path_or_dict")
    weights, metadata = fetch(source, **about_reading)
    return weights, metadata, {k: v for k, v in kwargs.items() if k not in names}


def _fitting(
    module: nn.Module, weights: Mapping[str, Any], start: str
) -> tuple[list[str], list[str]]:
    """The keys whose layer the model has, and those of the others."""
    layers = {name for name, _ in module.named_modules()}
    matched: list[str] = []
    unmatched: list[str] = []
    for key in weights:
        layer = _ENDING.sub("", key.removeprefix(start))
        fits = layer in layers or _old_style(layer) in layers
        (matched if fits else unmatched).append(key)
    return matched, unmatched


def _old_style(layer: str) -> str:
    """The layer that `attn.processor.to_q_lora` of an old file means."""
    layer = layer.replace(".processor.", ".").removesuffix("_lora")
    return re.sub(r"\.to_out$", ".to_out.0", layer)


def _nothing_fits(
    module: nn.Module, weights: Mapping[str, Any], ours: Mapping[str, Any], prefix: str | None
) -> str:
    name = type(module).__name__
    if not weights:
        return "the LoRA has no weights at all"
    if not ours:
        return (
            f"none of the LoRA's {len(weights)} keys starts with {prefix!r}, so nothing is for "
            f"{name}: they are {_some(weights)}. Is it one of another model? prefix=None takes "
            f"all keys."
        )
    layers = [n for n, part in module.named_modules() if isinstance(part, nn.Linear)]
    return (
        f"none of the LoRA's {len(ours)} weights fits {name}: they are for {_some(ours)}, and the "
        f"model has {_some(layers)}. Is it a LoRA of another model?"
    )


def _some(names: Any) -> str:
    shown = list(names)[:_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _free_name(module: nn.Module) -> str:
    from diffusers.utils import peft_utils

    name_for: Any = peft_utils.get_adapter_name
    return str(name_for(module))
