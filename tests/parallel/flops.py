"""Floating point operations of one forward on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


# The counter does not know the CPU's attention kernel.
_KERNELS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def count(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False, custom_mapping=_KERNELS) as counter:
        run()
    return counter.get_total_flops()
