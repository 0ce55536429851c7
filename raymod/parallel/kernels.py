"""Attention that also gives the log-sum-exp of each query's scores, which tells parts apart.

diffusers' attention dispatch gives none on CPU, so torch's own kernels are called here. What they
have in common: shapes `[batch, heads, tokens, dim]`, fewer key heads with grouped queries, masks
of four dims, bool or additive. Where a query sees no key at all, its output is zero and its
log-sum-exp is minus infinity; the kernels differ there and are brought into line.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

__all__ = ["attend"]

# Scores that the plain kernel holds at once, in elements.
MAX_SCORES = 1 << 24

# What the kernels of a GPU want the rows of a mask and of the head dim to be a multiple of.
MASK_STEP = 16
DIM_STEP = 8

Pair = tuple[torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str = "native",
) -> Pair:
    """Attention, and the log-sum-exp of the scores.

    Args:
        query: Shape `[batch, heads, queries, dim]`.
        key: Shape `[batch, heads, keys, dim]`, or fewer heads.
        value: Shape `[batch, heads, keys, any dim]`, as many heads as `key`.
        mask: Broadcasts to `[batch, heads, queries, keys]`: bool, where True is seen, or added
            to the scores.
        is_causal: Whether each query sees only the keys up to its own; without a mask.
        scale: Factor of the scores. None: one over the root of `dim`.
        backend: The name of one of torch's own backends in diffusers.

    Returns:
        The output, of the dtype of `query`, and the log-sum-exp, `[batch, heads, queries]` in at
        least fp32.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    hidden = None if mask is None else _hidden(mask)
    if mask is not None:
        mask = _additive(mask, query.dtype)
    output, lse = _kernel(query, key, value, mask, is_causal, scale, backend)
    if hidden is not None:
        lse = lse.masked_fill(hidden, -math.inf)
        output = output.masked_fill(hidden[..., None], 0)
    return output, lse


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    backend: str,
) -> Pair:
    kernels = backend != "_native_math" and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if kernels and query.device.type == "cpu":
        found: Pair = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return found
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # only the kernel for CPUs groups queries by itself
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    if kernels and query.device.type == "cuda":
        pair = _on_gpu(query, key, value, mask, is_causal, scale, backend)
        if pair is not None:
            return pair
    if is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = _additive(mask.tril()[None, None], query.dtype)
    return _plain(query, key, value, mask, scale)


def _on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    backend: str,
) -> Pair | None:
    """By the kernel that fits; None where none does."""
    aten = torch.ops.aten
    dim = query.shape[-1]
    query, key, value = (_padded(x, DIM_STEP) for x in (query, key, value))
    if mask is not None:
        # rows must begin at even addresses, also where the mask is a view
        keys = key.shape[2]
        mask = _padded(mask.expand(*mask.shape[:-1], keys), MASK_STEP)[..., :keys]
        mask = mask.to(query.dtype).expand(*query.shape[:3], keys)
    wanted = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, is_causal, False)
    if backend == "_native_cudnn":
        found = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, True, 0.0, is_causal, False, scale=scale
        )
    elif (
        mask is None
        and backend != "_native_efficient"
        and torch.backends.cuda.can_use_flash_attention(wanted)
    ):
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    elif torch.backends.cuda.can_use_efficient_attention(wanted):
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, 0.0, is_causal, scale=scale
        )
    else:
        return None
    batch, heads, queries, _ = query.shape
    lse = found[1].reshape(batch, heads, -1)[..., :queries]  # some are padded, some have a last dim
    return found[0][..., :dim], lse


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> Pair:
    """By the definition, some queries at a time."""
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = key.to(wide).transpose(-1, -2), value.to(wide)
    batch, heads, queries, _ = query.shape
    step = max(1, MAX_SCORES // max(1, batch * heads * key.shape[2]))
    outputs, sums = [], []
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        scores = (query[:, :, rows].to(wide) * scale) @ keys
        if mask is not None:
            scores = scores + (mask if mask.shape[2] == 1 else mask[:, :, rows])
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
        outputs.append((weights @ values).to(query.dtype))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    """Which queries see no key."""
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    return ~seen.any(-1)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the kernels add to the scores."""
    if mask.dtype != torch.bool:
        return mask if mask.dtype == torch.float32 else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def _padded(tensor: torch.Tensor, step: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % step
    return F.pad(tensor, (0, missing)) if missing else tensor
