"""Attention over the tokens of all ranks, through diffusers' attention dispatch.

Every backend that is registered there is wrapped once. The wrapper looks at the `_parallel_config`
that a processor passes along: if it is a sequence context that is switched on, queries, keys and
values are exchanged, the backend itself runs on what this rank computes, and the result is
exchanged back. Whatever else is passed goes straight to the backend. So any backend can be used,
also one that knows nothing of ranks, and other models in the process notice nothing.

Three exchanges, all exact for any number of tokens and heads:

- tokens for heads (Ulysses, arXiv:2309.14509): each rank gets all tokens of some heads.
- keys and values gathered: each rank keeps its queries and gets all keys. It moves more bytes from
  three ranks on, and is used where the heads cannot be dealt out evenly enough.
- keys and values passed round (`ring.py`), which holds the least at once; where a ring was asked
  for. With Ulysses as well, neighbours exchange tokens for heads first; where the heads cannot be
  dealt out, all ranks are one ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raymod.config import check_ring_backend
from raymod.errors import SplitError, UnsupportedError
from raymod.parallel.exchange import gather, swap
from raymod.parallel.masks import Layout, four_dims, layout, mask_numbers
from raymod.parallel.mesh import part_sizes
from raymod.parallel.ring import ring_attention
from raymod.parallel.sequence import SequenceContext

__all__ = ["install", "split_attention"]

Backend = Callable[..., Any]

# How many times its fair share of the heads the busiest rank may have.
MAX_IMBALANCE = 1.25


def install() -> None:
    """Wrap every backend that diffusers has registered; a second time only the new ones."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    for name, backend in list(registry._backends.items()):
        if not hasattr(backend, "_raymod_wrapped"):
            names = registry._supported_arg_names[name]
            takes_config = "_parallel_config" in names
            registry._backends[name] = _wrapped(backend, str(name.value), takes_config)
            names.add("_parallel_config")  # a backend that has no such argument must be told too


def _wrapped(backend: Backend, name: str, takes_config: bool) -> Backend:
    @functools.wraps(backend)
    def call(*args: Any, _parallel_config: Any = None, **kwargs: Any) -> Any:
        ours = isinstance(_parallel_config, SequenceContext)
        if takes_config:
            kwargs["_parallel_config"] = None if ours else _parallel_config
        if ours and _parallel_config.active:
            return split_attention(backend, name, _parallel_config, *args, **kwargs)
        return backend(*args, **kwargs)

    call._raymod_wrapped = True  # type: ignore[attr-defined]
    return call


def split_attention(
    backend: Backend,
    name: str,
    context: SequenceContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        backend: Computes attention on one rank.
        name: Its name in diffusers.
        context: Knows the other ranks.
        query: This rank's queries, shape `[batch, tokens, heads, dim]`.
        key: This rank's keys, the same shape; fewer heads with grouped queries.
        value: This rank's values.
        attn_mask: Along keys and queries of all tokens or of this rank's; else as the backend
            takes it.
        is_causal: Whether each query sees only the keys up to its own.
        kwargs: Passed to the backend as they are.

    Returns:
        Shape `[batch, tokens, heads, dim]`, for this rank's queries.

    Raises:
        UnsupportedError: Something whose split would not be certain to be exact.
    """
    _refuse_unknown(query, key, value, kwargs)
    shapes = [*query.shape, *key.shape, *value.shape]
    rows = context.numbers([*shapes, *mask_numbers(attn_mask)])
    _refuse_unequal(rows)
    query_tokens = [row[1] for row in rows]
    key_tokens = [row[5] for row in rows]
    mask_layout = layout(
        [(row[12], row[13], row[14]) for row in rows],
        batch=query.shape[0],
        query_tokens=query_tokens,
        key_tokens=key_tokens,
    )
    if is_causal:
        _refuse_unordered(context, query_tokens, key_tokens, attn_mask)
    heads = _deal_heads(query.shape[2], key.shape[2], context.ulysses_degree)
    if value.shape[2] != key.shape[2]:
        heads = None
    # the ranks whose queries this rank computes for, with some of the heads or alone
    span = context.neighbours if heads else slice(context.rank, context.rank + 1)
    mask = _whole_keys(attn_mask, mask_layout, key_tokens, context)
    mask = _rows(mask, mask_layout, query_tokens, span, context)
    if heads and context.ulysses_degree > 1:
        mask = _own_heads(mask, mask_layout, heads[0], context)
        dealt = [heads[0], heads[1], heads[1]]
        tokens = [query_tokens[span], key_tokens[span], key_tokens[span]]
        query, key, value = _to_heads([query, key, value], dealt, tokens, context)
    if context.ring_degree > 1:
        result = _by_ring(
            name,
            context,
            query,
            key,
            value,
            four_dims(mask, mask_layout),
            key_tokens,
            by_heads=heads is not None,
            is_causal=is_causal,
            **kwargs,
        )
    else:
        if not heads:
            if is_causal:
                start = sum(query_tokens[: context.rank])
                mask = _causal_rows(start, query.shape[1], sum(key_tokens), query.device)
            is_causal = False
            key = gather(key, 1, key_tokens, context.group)
            value = gather(value, 1, key_tokens, context.group)
        result = backend(
            query=query, key=key, value=value, attn_mask=mask, is_causal=is_causal, **kwargs
        )
    if heads and context.ulysses_degree > 1:
        (result,) = swap(
            [result],
            give_dim=1,
            give=[query_tokens[span]],
            take_dim=2,
            take=[heads[0]],
            group=context.ulysses_group,
        )
    return result


def _by_ring(
    name: str,
    context: SequenceContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    key_tokens: Sequence[int],
    *,
    by_heads: bool,
    is_causal: bool,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    **others: Any,
) -> torch.Tensor:
    check_ring_backend(context.ring_degree, name)
    asked = sorted(key for key, other in others.items() if other not in (None, False))
    if dropout_p or asked:
        raise UnsupportedError(
            f"ring attention has no {', '.join(asked) or 'dropout'}; use ulysses_degree"
        )
    tokens, group = list(key_tokens), context.group
    if by_heads:
        step = context.ulysses_degree
        tokens = [sum(tokens[first : first + step]) for first in range(0, len(tokens), step)]
        group = context.ring_group
    return ring_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=is_causal,
        tokens=tokens,
        group=group,
        scale=scale,
        backend=name,
    )


def _to_heads(
    tensors: list[torch.Tensor],
    heads: list[list[int]],
    tokens: list[list[int]],
    context: SequenceContext,
) -> list[torch.Tensor]:
    """All tokens of this rank's heads; in one exchange where the dtypes allow it."""
    together = len({tensor.dtype for tensor in tensors}) == 1
    batches = [slice(0, 3)] if together else [slice(n, n + 1) for n in range(3)]
    return [
        tensor
        for one in batches
        for tensor in swap(
            tensors[one],
            give_dim=2,
            give=heads[one],
            take_dim=1,
            take=tokens[one],
            group=context.ulysses_group,
        )
    ]


def _deal_heads(queries: int, keys: int, degree: int) -> tuple[list[int], list[int]] | None:
    """How many query heads and key heads each rank gets; None: keys are to be gathered.

    Grouped queries go with their keys.
    """
    if keys == 0 or queries % keys or max(part_sizes(keys, degree)) * degree > MAX_IMBALANCE * keys:
        return None
    dealt = part_sizes(keys, degree)
    if min(dealt) == 0:
        return None
    return [n * (queries // keys) for n in dealt], dealt


def _whole_keys(
    mask: torch.Tensor | None,
    found: Layout | None,
    key_tokens: Sequence[int],
    context: SequenceContext,
) -> torch.Tensor | None:
    if mask is None or found is None or found.keys != "own":
        return mask
    return gather(mask, -1, key_tokens, context.group)


def _rows(
    mask: torch.Tensor | None,
    found: Layout | None,
    query_tokens: Sequence[int],
    span: slice,
    context: SequenceContext,
) -> torch.Tensor | None:
    """The mask for the queries of the ranks in `span`."""
    if mask is None or found is None or not found.has_queries or found.queries == "one":
        return mask
    if found.queries == "all":
        return mask.narrow(-2, sum(query_tokens[: span.start]), sum(query_tokens[span]))
    if span.stop - span.start == 1:
        return mask
    return gather(mask, -2, query_tokens[span], context.ulysses_group)


def _own_heads(
    mask: torch.Tensor | None,
    found: Layout | None,
    query_heads: Sequence[int],
    context: SequenceContext,
) -> torch.Tensor | None:
    """The mask for this rank's heads."""
    if mask is None or found is None:
        return mask
    if not found.has_heads or mask.shape[1] == 1:
        return mask
    if mask.shape[1] != sum(query_heads):
        raise UnsupportedError(
            f"the attention mask has {mask.shape[1]} heads, the queries {sum(query_heads)}"
        )
    place = context.ulysses_rank
    return mask.narrow(1, sum(query_heads[:place]), query_heads[place])


def _causal_rows(start: int, size: int, keys: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(start, start + size, device=device)
    return (torch.arange(keys, device=device) <= places[:, None])[None, None]


def _refuse_unordered(
    context: SequenceContext,
    query_tokens: Sequence[int],
    key_tokens: Sequence[int],
    mask: torch.Tensor | None,
) -> None:
    """Causal attention needs the tokens in order: those of one sequence, cut once."""
    total = sum(query_tokens)
    in_order = query_tokens == part_sizes(total, context.degree) and context.cuts == {total}
    if mask is not None or query_tokens != key_tokens or not in_order:
        raise UnsupportedError(
            "causal attention over several streams of tokens, or with a mask, is not split: "
            "the order of the tokens over the ranks is not certain. Use batch_degree"
        )


def _refuse_unequal(rows: Sequence[tuple[int, ...]]) -> None:
    """Only the tokens may differ between ranks, and keys go with their values."""
    others = {(row[0], *row[2:5], *row[6:9], *row[10:12]) for row in rows}
    if len(others) > 1 or any(row[5] != row[9] for row in rows):
        shapes = [(row[0:4], row[4:8], row[8:12]) for row in rows]
        raise SplitError(f"queries, keys and values do not match over the ranks: {shapes}")


def _refuse_unknown(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise UnsupportedError(
                f"attention is split where {name} has the shape [batch, tokens, heads, dim], "
                f"not {list(tensor.shape)}"
            )
    if kwargs.get("return_lse"):
        raise UnsupportedError("return_lse=True is not split; use batch_degree")
    tensors = sorted(name for name, x in kwargs.items() if isinstance(x, torch.Tensor))
    if tensors:
        raise UnsupportedError(
            f"attention with {', '.join(tensors)} is not split; use batch_degree"
        )
