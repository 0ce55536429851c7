"""Attention over the tokens of all ranks, through diffusers' attention dispatch.

Every backend that is registered there is wrapped once. The wrapper looks at the `_parallel_config`
that a processor passes along: if it is a sequence context that is switched on, queries, keys and
values are exchanged, the backend itself runs on what this rank computes, and the result is
exchanged back. Whatever else is passed goes straight to the backend. So any backend can be used,
also one that knows nothing of ranks, and other models in the process notice nothing.

Two exchanges, both exact for any number of tokens and heads:

- tokens for heads (Ulysses, arXiv:2309.14509): each rank gets all tokens of some heads.
- keys and values gathered: each rank keeps its queries and gets all keys. It moves more bytes from
  three ranks on, and is used where the heads cannot be dealt out evenly enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raymod.errors import SplitError, UnsupportedError
from raymod.parallel.exchange import gather, swap
from raymod.parallel.masks import Layout, layout, mask_numbers
from raymod.parallel.mesh import part_sizes
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
            registry._backends[name] = _wrapped(backend, "_parallel_config" in names)
            names.add("_parallel_config")  # a backend that has no such argument must be told too


def _wrapped(backend: Backend, takes_config: bool) -> Backend:
    @functools.wraps(backend)
    def call(*args: Any, _parallel_config: Any = None, **kwargs: Any) -> Any:
        ours = isinstance(_parallel_config, SequenceContext)
        if takes_config:
            kwargs["_parallel_config"] = None if ours else _parallel_config
        if ours and _parallel_config.active:
            return split_attention(backend, _parallel_config, *args, **kwargs)
        return backend(*args, **kwargs)

    call._raymod_wrapped = True  # type: ignore[attr-defined]
    return call


def split_attention(
    backend: Backend,
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
    mask = _whole_keys(attn_mask, mask_layout, key_tokens, context)
    heads = _deal_heads(query.shape[2], key.shape[2], context.degree)
    if heads is None or value.shape[2] != key.shape[2]:
        own = (sum(query_tokens[: context.rank]), query_tokens[context.rank])
        mask = _own_rows(mask, mask_layout, own)
        if is_causal:
            mask = _causal_rows(own, sum(key_tokens), query.device)
        key = gather(key, 1, key_tokens, context.group)
        value = gather(value, 1, key_tokens, context.group)
        result: torch.Tensor = backend(
            query=query, key=key, value=value, attn_mask=mask, is_causal=False, **kwargs
        )
        return result

    query_heads, key_heads = heads
    mask = _own_heads(mask, mask_layout, query_tokens, query_heads, context)
    tokens = [query_tokens, key_tokens, key_tokens]
    dealt = [query_heads, key_heads, key_heads]
    query, key, value = _to_heads([query, key, value], dealt, tokens, context)
    result = backend(
        query=query, key=key, value=value, attn_mask=mask, is_causal=is_causal, **kwargs
    )
    (result,) = swap(
        [result],
        give_dim=1,
        give=[query_tokens],
        take_dim=2,
        take=[query_heads],
        group=context.group,
    )
    return result


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
            group=context.group,
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


def _own_rows(
    mask: torch.Tensor | None, found: Layout | None, own: tuple[int, int]
) -> torch.Tensor | None:
    """The mask for this rank's queries."""
    if mask is None or found is None or not found.has_queries or found.queries != "all":
        return mask
    return mask.narrow(-2, *own)


def _own_heads(
    mask: torch.Tensor | None,
    found: Layout | None,
    query_tokens: Sequence[int],
    query_heads: Sequence[int],
    context: SequenceContext,
) -> torch.Tensor | None:
    """The mask for all queries of this rank's heads."""
    if mask is None or found is None:
        return mask
    if found.has_queries and found.queries == "own":
        mask = gather(mask, -2, query_tokens, context.group)
    if not found.has_heads or mask.shape[1] == 1:
        return mask
    if mask.shape[1] != sum(query_heads):
        raise UnsupportedError(
            f"the attention mask has {mask.shape[1]} heads, the queries {sum(query_heads)}"
        )
    return mask.narrow(1, sum(query_heads[: context.rank]), query_heads[context.rank])


def _causal_rows(own: tuple[int, int], keys: int, device: torch.device) -> torch.Tensor:
    start, size = own
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
