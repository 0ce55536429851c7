"""A module held against a checkpoint: which weight stands where, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raymod.errors import ConfigError, WeightsError
from raymod.weights.checkpoint import Checkpoint, Stored, open_checkpoint
from raymod.weights.image import Cast, Content
from raymod.weights.local import named_weights
from raymod.weights.mapped import files_of

__all__ = ["Match", "fitting", "match", "origin"]

_SHOWN = 3


@dataclass(frozen=True)
class Match:
    """What of a module stands in a checkpoint.

    Attributes:
        contents: By the tensor's `id`.
        missing: Names that the checkpoint does not have.
    """

    contents: Mapping[int, Content]
    missing: tuple[str, ...]


def match(module: nn.Module, checkpoint: Checkpoint) -> Match:
    """Find the module's weights in a checkpoint, by name.

    Where both dtypes are floating, the checkpoint's values are cast to the module's dtype.

    Raises:
        WeightsError: None is there, or a shape or dtype does not fit.
    """
    contents: dict[int, Content] = {}
    missing, misfits = [], []
    for names, tensors in _groups(module):
        stored = next(
            (checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None
        )
        if stored is None:
            missing.append(names[0])
            continue
        content = fitting(stored, tensors[0])
        if content is None:
            there = _show(stored.meta.dtype, stored.meta.shape)
            misfits.append(
                f"{names[0]} is {_show(tensors[0].dtype, tensors[0].shape)} in the "
                f"module and {there} in the checkpoint"
            )
            continue
        contents.update((id(tensor), content) for tensor in tensors)
    kind = type(module).__name__
    if misfits:
        more = f" ({len(misfits)} in all)" if len(misfits) > _SHOWN else ""
        raise WeightsError(
            f"the checkpoint {checkpoint.path} does not fit the {kind}: "
            f"{'; '.join(misfits[:_SHOWN])}{more}. Give the one that it was loaded from, or "
            f"weights='memory'."
        )
    if missing and not contents:
        raise WeightsError(
            f"none of the weights of the {kind} is in {checkpoint.path}: the module has "
            f"{', '.join(missing[:_SHOWN])}, the checkpoint has "
            f"{', '.join(list(checkpoint.tensors)[:_SHOWN]) or 'nothing'}. Names must be the same; "
            f"a checkpoint in another layout can be read by a function: weights=load_transformer."
        )
    return Match(contents, tuple(missing))


def fitting(stored: Stored, tensor: torch.Tensor) -> Content | None:
    """What stands for `tensor`, of its shape and in its dtype; None if `stored` cannot."""
    if stored.meta.shape != tuple(tensor.shape):
        return None
    if stored.meta.dtype == tensor.dtype:
        return stored
    both = stored.meta.dtype.is_floating_point and tensor.dtype.is_floating_point
    return Cast(stored, tensor.dtype) if both else None


def origin(module: nn.Module) -> Checkpoint:
    """The checkpoint that a module was loaded from.

    diffusers notes the folder in the config, but no subfolder of it: then the subfolder is the one
    that fits. Failing that, the files that its weights are mapped from.

    Raises:
        ConfigError: It cannot be told.
    """
    kind = type(module).__name__
    noted = _noted(module)
    candidates = list(_candidates(noted, module)) if noted is not None else []
    if len(candidates) == 1:
        return candidates[0]
    mapped = _mapped(module)
    if mapped is not None:
        return mapped
    if candidates:
        raise ConfigError(
            f"weights='checkpoint': the {kind} may come from any of "
            f"{', '.join(c.path for c in candidates)}. Give the path: weights=..."
        )
    noted_text = f"its config names {noted!r}, where nothing fits" if noted else "it does not say"
    raise ConfigError(
        f"weights='checkpoint': where the {kind} was loaded from cannot be told ({noted_text}). "
        f"Give the path of the folder or file: weights=..."
    )


def _noted(module: nn.Module) -> str | None:
    """The folder or name that the config says the module was loaded from."""
    config: Any = getattr(module, "config", None)
    name = config.get("_name_or_path") if isinstance(config, Mapping) else None
    return str(name) if name else None


def _candidates(noted: str, module: nn.Module) -> Iterable[Checkpoint]:
    folder = Path(noted).expanduser()
    if not folder.is_dir():
        return
    places = [folder, *(path for path in sorted(folder.iterdir()) if path.is_dir())]
    for place in places:
        if place != folder and _class_name(place) != type(module).__name__:
            continue
        try:
            checkpoint = open_checkpoint(place)
            found = match(module, checkpoint)
        except (ConfigError, WeightsError):
            continue
        if not found.missing:
            yield checkpoint


def _class_name(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "config.json").read_bytes())["_class_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(module: nn.Module) -> Checkpoint | None:
    """The files that hold the module's weights, as one checkpoint, if no name comes up twice."""
    tensors: dict[str, Stored] = {}
    files = files_of(module)
    for path in files:
        try:
            own = open_checkpoint(path).tensors
        except (ConfigError, WeightsError, OSError):
            return None
        if tensors.keys() & own.keys():
            return None
        tensors.update(own)
    return Checkpoint(" and ".join(files), tensors) if tensors else None


def _groups(module: nn.Module) -> Iterable[tuple[list[str], list[torch.Tensor]]]:
    """The weights of a module; those on the very same memory are one."""
    groups: dict[object, tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor, _, _ in named_weights(module):
        names, tensors = groups.setdefault(_place(tensor), ([], []))
        names.append(name)
        if not any(tensor is other for other in tensors):
            tensors.append(tensor)
    return groups.values()


def _place(tensor: torch.Tensor) -> object:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_meta or not tensor.nbytes:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _show(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
