"""Attention alone, on a rank: its own tokens go in, and what it should get is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from raymod.config import Degrees
from raymod.parallel import Mesh, SequenceContext
from raymod.parallel.attention import install
from raymod.parallel.mesh import part_sizes
from tests.parallel.cases import attempt

BATCH = 2


@dataclass(frozen=True)
class Case:
    """One attention call.

    `mask` names its shape on each rank: `b` batch, `h` heads, `1` broadcast, `q` and `k` this
    rank's tokens, `Q` and `K` all of them.
    """

    heads: int = 4
    key_heads: int | None = None
    queries: int = 17
    keys: int = 13
    mask: str = ""
    additive: bool = False
    hidden: float | None = None  # what an additive mask has for what is not seen
    whole_parts: bool = False  # hides all of the first rank's keys, and some queries from all keys
    causal: bool = False
    dtype: torch.dtype = torch.float32
    value_dtype: torch.dtype | None = None
    value_dim: int = 8
    backend: str = "native"
    batch: int = BATCH
    cut: bool = True  # whether the context saw one sequence of this length being cut
    kwargs: tuple[tuple[str, Any], ...] = ()


_meshes: dict[Degrees, Mesh] = {}


def context_of(ring: int) -> SequenceContext:
    """All ranks share a sequence, in a ring of so many parts."""
    size = dist.get_world_size()
    degrees = Degrees(ring_degree=ring, ulysses_degree=size // ring)
    if degrees not in _meshes:
        _meshes[degrees] = Mesh(degrees, torch.device("cpu"))
    return SequenceContext.of(_meshes[degrees])


def attention(case: Case, ring: int = 1) -> tuple[float, str]:
    """The largest difference from the rank's rows of the whole result, and what was raised."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    install()
    context = context_of(ring)
    generator = torch.Generator().manual_seed(7)
    key_heads = case.key_heads or case.heads
    shapes = {
        "query": (case.batch, case.queries, case.heads, 8),
        "key": (case.batch, case.keys, key_heads, 8),
        "value": (case.batch, case.keys, key_heads, case.value_dim),
    }
    whole = {
        name: torch.randn(shape, generator=generator).to(case.dtype)
        for name, shape in shapes.items()
    }
    mask = _mask(case, generator)
    options: dict[str, Any] = {
        "is_causal": case.causal,
        "enable_gqa": key_heads != case.heads,
        "backend": AttentionBackendName(case.backend),
        "attention_kwargs": dict(case.kwargs),
    }
    queries = _own(case.queries, context)
    keys = _own(case.keys, context)
    own = {name: x[:, queries if name == "query" else keys] for name, x in whole.items()}
    own_mask = None if mask is None else _cut(mask, case, queries, keys)
    results = []
    for _ in range(2):  # the second time the sizes are known already
        with context.on(0):
            if case.cut:
                context.cuts = {case.queries}
            result, error = attempt(
                lambda: dispatch_attention_fn(
                    **own, attn_mask=own_mask, parallel_config=context, **options
                )
            )
            results.append(result)
            if error:
                return -1.0, error
    options.pop("attention_kwargs")
    due = dispatch_attention_fn(**whole, attn_mask=mask, **options)[:, queries]
    assert results[0].shape == due.shape
    assert results[0].dtype == due.dtype
    return max((due.double() - result.double()).abs().max().item() for result in results), ""


def _own(tokens: int, context: SequenceContext) -> slice:
    sizes = part_sizes(tokens, context.degree)
    start = sum(sizes[: context.rank])
    return slice(start, start + sizes[context.rank])


def _mask(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if not case.mask:
        return None
    sizes = {
        "b": case.batch,
        "h": case.heads,
        "1": 1,
        "q": case.queries,
        "Q": case.queries,
        "k": case.keys,
        "K": case.keys,
    }
    values = torch.randn([sizes[letter] for letter in case.mask], generator=generator)
    seen = values > -0.5
    seen[..., -1] = True  # no query without a key
    if case.whole_parts:
        seen[..., : case.keys // 2 + 1] = False
        if seen.shape[-2] > 1:
            seen[..., ::5, :] = False
    if case.hidden is not None:
        return torch.where(seen, 0.0, case.hidden).to(case.dtype)
    return values.to(case.dtype) if case.additive else seen


def _cut(mask: torch.Tensor, case: Case, queries: slice, keys: slice) -> torch.Tensor:
    for dim, letter in enumerate(case.mask):
        if letter in "qk":
            own = queries if letter == "q" else keys
            mask = mask.narrow(dim, own.start, own.stop - own.start)
    return mask
