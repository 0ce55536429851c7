"""A diffusers model as a skeleton, from the folder it was saved to; its weights stay there.

What the ranks get is what the class's own `from_pretrained` would have loaded: the same values in
the same dtypes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raymod.errors import ConfigError, UnsupportedError, WeightsError
from raymod.weights.checkpoint import Checkpoint, open_checkpoint
from raymod.weights.image import Content
from raymod.weights.local import named_weights
from raymod.weights.matching import fitting
from raymod.weights.offers import ImageOffer, Offer
from raymod.weights.skeleton import no_parameters

__all__ = ["Pretrained", "read_pretrained"]

_LOADER = "raymod.from_loader(lambda: {cls}.from_pretrained(...)) lets each rank load it itself"


@dataclass(frozen=True)
class Pretrained:
    """A model of which only the structure is here.

    Attributes:
        module: The skeleton: weights on the meta device, all else real.
        offer: Its weights on offer to the ranks.
    """

    module: nn.Module
    offer: Offer


def read_pretrained(
    path: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    cls: type[nn.Module] | None = None,
    torch_dtype: torch.dtype | None = None,
) -> Pretrained:
    """Read a model's config and the headers of its checkpoint.

    Args:
        path: Folder of the model, or of a pipeline.
        subfolder: Where in that folder the model is.
        cls: Its class. None: the one of diffusers that the config names.
        torch_dtype: As for diffusers' `from_pretrained`.

    Raises:
        ConfigError: There is no such model, or no such class.
        WeightsError: The checkpoint does not hold the model's weights.
    """
    _check_dtype(torch_dtype)
    folder = _folder(path, subfolder)
    config = _config(folder)
    kind = cls if cls is not None else _class_of(config, folder)
    module = _build(kind, config, torch_dtype)
    checkpoint = open_checkpoint(folder)
    contents, warnings = _place(module, checkpoint, torch_dtype)
    module.register_to_config(_name_or_path=os.fspath(path))  # type: ignore[operator]
    module.eval()
    offered = ImageOffer(module, contents, warnings=warnings)
    offered.keep()
    return Pretrained(module, offered)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"torch_dtype must be a floating dtype like torch.bfloat16, not {dtype!r}"
        )
    if dtype.itemsize == 1:
        raise UnsupportedError(
            f"torch_dtype={dtype}: models do not compute in it. Load in torch.bfloat16."
        )


def _folder(path: str | os.PathLike[str], subfolder: str | None) -> Path:
    root = Path(os.path.abspath(os.path.expanduser(path)))
    if not root.is_dir():
        raise ConfigError(
            f"{os.fspath(path)!r} is not a folder here. A model that is not on this machine must "
            f"be downloaded first (huggingface_hub.snapshot_download)."
        )
    folder = root / subfolder if subfolder else root
    if (folder / "config.json").is_file():
        return folder
    models = sorted(config.parent.name for config in root.glob("*/config.json"))
    where = f" Give subfolder=, one of {', '.join(models)}." if models else ""
    raise ConfigError(f"{folder} holds no model (no config.json).{where}")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise WeightsError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{folder / 'config.json'} is not a model's config")
    if config.get("quantization_config"):
        raise UnsupportedError(f"the model in {folder} is quantised: {_LOADER.format(cls='Cls')}")
    return config


def _class_of(config: Mapping[str, Any], folder: Path) -> type[nn.Module]:
    name = config.get("_class_name")
    if not name:
        raise ConfigError(
            f"the config in {folder} does not name a diffusers class. Give it as cls=, if it has "
            f"diffusers' from_config; else {_LOADER.format(cls='Cls')}"
        )
    import diffusers

    cls = getattr(diffusers, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(
            f"diffusers {diffusers.__version__} has no model {name!r}, which the config in "
            f"{folder} names. Give the class as cls="
        )
    return cls


def _build(cls: Any, config: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    if not hasattr(cls, "from_config") or not issubclass(cls, nn.Module):
        raise ConfigError(
            f"cls={getattr(cls, '__name__', cls)!r} is no diffusers model (it has no from_config): "
            f"{_LOADER.format(cls=getattr(cls, '__name__', 'Cls'))}"
        )
    try:
        with _default_dtype(dtype), no_parameters():
            module = cls.from_config(config)
    except Exception as error:
        raise WeightsError(
            f"{cls.__name__} cannot be built from its config without weights: {error}. "
            f"{_LOADER.format(cls=cls.__name__)}"
        ) from error
    assert isinstance(module, nn.Module)
    return module


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Buffers are made in it, as diffusers makes them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype is not None else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _place(
    module: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> tuple[dict[int, Content], tuple[str, ...]]:
    """Put every weight on the meta device, and say where in the checkpoint it stands."""
    contents: dict[int, Content] = {}
    empties: dict[int, torch.Tensor] = {}
    problems = []
    used = set()
    for name, tensor, holder, key in list(named_weights(module)):
        stored = checkpoint.tensors.get(name)
        if stored is not None:
            used.add(name)
        if id(tensor) not in empties:
            wanted = _dtype_of(module, name, tensor, dtype)
            empties[id(tensor)] = _empty(tensor, wanted)
        empty = holder[key] = empties[id(tensor)]
        if stored is None or id(empty) in contents:
            continue
        content = fitting(stored, empty)
        if content is None:
            problems.append(
                f"{name} must be {empty.dtype}{list(empty.shape)}, and is {stored.meta.dtype}"
                f"{list(stored.meta.shape)} there"
            )
        else:
            contents[id(empty)] = content
    missing = [name for name, tensor, _, _ in named_weights(module) if id(tensor) not in contents]
    problems = problems or [f"{name} is not there" for name in missing]
    if problems:
        more = f" ({len(problems)} in all)" if len(problems) > 3 else ""
        raise WeightsError(
            f"{checkpoint.path} does not hold the weights of a {type(module).__name__}: "
            f"{'; '.join(problems[:3])}{more}"
        )
    return contents, _unused(module, checkpoint, used)


def _dtype_of(
    module: Any, name: str, tensor: torch.Tensor, wanted: torch.dtype | None
) -> torch.dtype:
    """The dtype of a weight after loading, by diffusers' rule."""
    if wanted is None or not tensor.is_floating_point():
        return tensor.dtype
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    names = [kept] if isinstance(kept, str) else kept
    return torch.float32 if set(names) & set(name.split(".")) else wanted


def _empty(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta", dtype=dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


def _unused(module: Any, checkpoint: Checkpoint, used: set[str]) -> tuple[str, ...]:
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    names = [
        name
        for name in checkpoint.tensors
        if name not in used and not any(re.search(pattern, name) for pattern in patterns)
    ]
    if not names:
        return ()
    return (
        f"{len(names)} tensors of {checkpoint.path} are not used by a {type(module).__name__} "
        f"({names[0]}, ...)",
    )
