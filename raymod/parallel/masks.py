"""What part of an attention mask a rank needs, decided by sizes that all ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from raymod.errors import UnsupportedError

__all__ = ["Layout", "four_dims", "layout", "mask_numbers"]

Axis = Literal["all", "own", "one"]


@dataclass(frozen=True)
class Layout:
    """What a mask holds along its axes: all tokens, the rank's own ones, or one entry for all.

    Attributes:
        keys: Along the keys, the last dim.
        queries: Along the queries, the dim before, where it has one.
        has_queries: Whether it has that dim; a mask of shape `[batch, keys]` has not.
        has_heads: Whether it has 4 dims: batch, heads, queries, keys.
    """

    keys: Axis
    queries: Axis
    has_queries: bool
    has_heads: bool


def mask_numbers(mask: Any) -> tuple[int, int, int]:
    """Number of dims and the sizes of the last two, `-1` for what is not there.

    Raises:
        UnsupportedError: No tensor, or of a shape whose meaning is not certain.
    """
    if mask is None:
        return 0, -1, -1
    if not isinstance(mask, torch.Tensor):
        raise UnsupportedError(
            f"an attention mask of type {type(mask).__name__} cannot be divided over ranks; "
            f"give a tensor, or use batch_degree"
        )
    if not 2 <= mask.ndim <= 4 or (mask.ndim == 3 and mask.shape[0] != 1):
        raise UnsupportedError(
            f"an attention mask of shape {list(mask.shape)} can mean several things; "
            f"give it as [batch, heads, queries, keys]"
        )
    return mask.ndim, mask.shape[-2], mask.shape[-1]


def layout(
    rows: Sequence[tuple[int, int, int]],
    *,
    batch: int,
    query_tokens: Sequence[int],
    key_tokens: Sequence[int],
) -> Layout | None:
    """What the mask holds on each axis.

    Args:
        rows: `mask_numbers` of each rank.
        batch: Samples in the batch.
        query_tokens: Number of queries on each rank.
        key_tokens: Number of keys on each rank.

    Returns:
        The layout, the same on all ranks; None where there is no mask.

    Raises:
        UnsupportedError: The sizes fit no reading, or more than one.
    """
    ndims = {ndim for ndim, _, _ in rows}
    if ndims == {0}:
        return None
    if len(ndims) > 1:
        raise UnsupportedError("only some ranks have an attention mask")
    ndim = ndims.pop()
    keys = _axis([row[2] for row in rows], key_tokens, "key")
    seconds = [row[1] for row in rows]
    has_queries = ndim > 2 or not _is_batch(seconds, batch, query_tokens)
    queries: Axis = _axis(seconds, query_tokens, "query") if has_queries else "one"
    if keys == "own" and queries == "own":
        raise UnsupportedError(
            "an attention mask that was cut along queries and keys lacks what lies between the "
            "ranks' tokens; cut one of them only"
        )
    return Layout(keys=keys, queries=queries, has_queries=has_queries, has_heads=ndim == 4)


def four_dims(mask: torch.Tensor | None, found: Layout | None) -> torch.Tensor | None:
    """The same mask as `[batch, heads, queries, keys]`."""
    if mask is None or found is None or mask.ndim == 4:
        return mask
    return mask.reshape(1, 1, *mask.shape[-2:]) if found.has_queries else mask[:, None, None]


def _axis(sizes: Sequence[int], tokens: Sequence[int], what: str) -> Axis:
    if list(sizes) == list(tokens):
        return "own"
    if all(size == sum(tokens) for size in sizes):
        return "all"
    if all(size == 1 for size in sizes):
        return "one"
    raise UnsupportedError(
        f"the attention mask has sizes {list(sizes)} along its {what} dim on the ranks, which fit "
        f"neither their own {what} tokens {list(tokens)} nor all {sum(tokens)}"
    )


def _is_batch(sizes: Sequence[int], batch: int, query_tokens: Sequence[int]) -> bool:
    """Whether the first of two dims is the batch, as it is where both readings fit unsplit."""
    if any(size != batch for size in sizes):
        return False
    if batch > 1 and list(sizes) == list(query_tokens):
        raise UnsupportedError(
            f"an attention mask of {batch} rows can be one a sample or one a query token; "
            f"give it as [batch, heads, queries, keys]"
        )
    return True
