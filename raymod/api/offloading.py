"""A module that is offloaded in parts: its hooks come off for the wrapping, and on again after it.

What accelerate and diffusers do to a module's parts moves the weights away, or replaces them. On a
stub there is nothing to offload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["detach"]

logger = logging.getLogger(__name__)

_GROUP_HOOKS = ("_GROUP_OFFLOADING", "_LAYER_EXECUTION_TRACKER", "_LAZY_PREFETCH_GROUP_OFFLOADING")


def detach(module: nn.Module) -> Callable[[], None]:
    """Take sequential and group offloading off a module.

    Args:
        module: The module; its weights are where they were before it was offloaded.

    Returns:
        What puts the offloading back on.
    """
    steps = [step for step in (_sequential(module), _group(module)) if step is not None]
    if steps:
        logger.info("%s is not offloaded while it is wrapped", type(module).__name__)

    def put_back() -> None:
        for step in steps:
            step()

    return put_back


def _sequential(module: nn.Module) -> Callable[[], None] | None:
    hooks: list[Any] = [getattr(part, "_hf_hook", None) for part in module.modules()]
    offloading = [hook for hook in hooks if getattr(hook, "offload", False)]
    if not offloading:
        return None
    import accelerate
    from accelerate.hooks import remove_hook_from_module

    device = offloading[0].execution_device
    with_buffers = bool(module._parameters)  # as pipelines do
    remove_hook_from_module(module, recurse=True)
    return lambda: accelerate.cpu_offload(module, device, offload_buffers=with_buffers)


def _group(module: nn.Module) -> Callable[[], None] | None:
    if not any(hasattr(part, "_diffusers_hook") for part in module.modules()):
        return None
    from diffusers.hooks import group_offloading as group

    library: Any = group
    top = library._get_top_level_group_offload_hook(module)
    if top is None:
        return None
    registry = library.HookRegistry.check_if_exists_or_initialize(module)
    for name in _GROUP_HOOKS:
        registry.remove_hook(getattr(library, name), recurse=True)
    return lambda: library._apply_group_offloading(module, top.config)
