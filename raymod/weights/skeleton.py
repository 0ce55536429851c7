"""Modules without weights: the structure, with tensors on the meta device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from raymod.calls.packing import put_together, take_apart
from raymod.errors import PackError
from raymod.weights.local import named_weights
from raymod.weights.strip import without_hooks

__all__ = ["Skeleton", "no_parameters", "pack_skeleton", "unpack_skeleton"]

Skeleton = tuple[bytes, Sequence[torch.Tensor]]


@contextmanager
def no_parameters() -> Iterator[None]:
    """While in it, parameters that this thread gives to modules come out on the meta device.

    Each is dropped before the next is made, and its initialization, which comes later, costs
    nothing. Buffers are what their module makes them.
    """
    owner = threading.get_ident()

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != owner or type(parameter) is not nn.Parameter:
            return None
        if parameter.is_meta:
            return None
        original: Any = parameter
        if not hasattr(original, "_empty"):  # one that is registered twice is tied
            empty = parameter.detach().to("meta")
            original._empty = nn.Parameter(empty, parameter.requires_grad)
        return cast("nn.Parameter", original._empty)

    hook: Any = register  # torch's annotation leaves out the arguments and the result
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def pack_skeleton(module: nn.Module) -> Skeleton:
    """The module without its parameters and persistent buffers, to be sent.

    Non-persistent buffers, and other tensors that the module holds, travel as they are: they are
    small, belong to no checkpoint, and helpers that a pipeline calls on the driver read them.

    Raises:
        PackError: Part of the module does not pickle.
    """
    weights = {id(tensor) for _, tensor, _, _ in named_weights(module)}
    unhooked = without_hooks(module)

    def reduce(obj: Any) -> Any:
        if id(obj) in weights:  # only of classes of their own: quantized, say
            return _empty, (obj.shape, obj.dtype, obj.requires_grad)
        return unhooked(obj)

    skeleton, tensors = take_apart(module, what=type(module).__name__, reduce=reduce, meta=True)
    return skeleton, [
        torch.empty_like(tensor.detach(), device="meta") if id(tensor) in weights else _own(tensor)
        for tensor in tensors
    ]


def unpack_skeleton(packed: Skeleton) -> nn.Module:
    """The module of `pack_skeleton`.

    Raises:
        PackError: It needs code that this process cannot import.
    """
    try:
        module = put_together(*packed)
    except (ImportError, AttributeError) as error:
        raise PackError(
            f"the module that the ranks loaded cannot be described in this process: {error}. "
            f"Install here what it is made of."
        ) from error
    assert isinstance(module, nn.Module)
    return module


def _empty(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that holds nothing beyond what it shows."""
    tensor = tensor.detach()
    return tensor if tensor.is_meta else tensor.cpu().clone(memory_format=torch.contiguous_format)
