"""The modes of torch that a call is made in: what holds in the driver holds on the ranks too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["MODES", "in_modes", "modes"]

# Travels among the contexts of a call, under this name.
MODES = "raymod.modes"

_DEVICES = ("cpu", "cuda", "xpu")


def modes() -> dict[str, Any]:
    """What is not as torch has it from the start.

    `torch.autocast`, `torch.set_default_dtype`, `torch.set_float32_matmul_precision` and
    `torch.use_deterministic_algorithms`.
    """
    found: dict[str, Any] = {}
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in _DEVICES
        if torch.is_autocast_enabled(kind)
    )
    if autocast:
        found["autocast"] = autocast
    if torch.get_default_dtype() is not torch.float32:
        found["default_dtype"] = torch.get_default_dtype()
    if torch.get_float32_matmul_precision() != "highest":
        found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    if torch.are_deterministic_algorithms_enabled():
        found["deterministic"] = torch.is_deterministic_algorithms_warn_only_enabled()
    return found


@contextmanager
def in_modes(wanted: Mapping[str, Any]) -> Iterator[None]:
    """On a rank: what `modes` found in the driver; as it was, afterwards."""
    with ExitStack() as stack:
        for kind, dtype, cached in wanted.get("autocast", ()):
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
        if "default_dtype" in wanted:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(wanted["default_dtype"])
        if "float32_matmul_precision" in wanted:
            before = torch.get_float32_matmul_precision()
            stack.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision(wanted["float32_matmul_precision"])
        if "deterministic" in wanted:
            stack.callback(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True, warn_only=wanted["deterministic"])
        yield
