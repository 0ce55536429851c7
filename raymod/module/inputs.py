"""What a call is given, looked at before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raymod.errors import PackError, UnsupportedError

__all__ = ["checked_inputs"]


def checked_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call.

    Raises:
        UnsupportedError: One wants gradients while gradients are on.
        PackError: A container holds itself.
    """
    try:
        leaves = pytree.tree_leaves((args, dict(kwargs)))
    except RecursionError as error:
        raise PackError(
            "an argument is a container that holds itself, or containers nested thousands deep: "
            "neither can be sent to the ranks"
        ) from error
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise UnsupportedError(
            "an input requires gradients, and the ranks run inference only: call the module "
            "under torch.no_grad(), detach the input, or unwrap the module to train it."
        )
    return inputs
