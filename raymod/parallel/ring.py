"""Ring attention: keys and values go round the ranks, each of which keeps its queries.

After each step a rank has attended to one more rank's keys; the parts are put together by their
log-sum-exps (arXiv:2310.01889). No rank ever holds the keys of more than two ranks, and heads need
not divide. Exact for parts of any sizes, and for masks: each step takes its own columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from raymod.parallel.kernels import attend

__all__ = ["ring_attention"]

# A mask may hide a query by a number so large that nothing of its scores is left beside it.
DROWNING = -1e30


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    tokens: Sequence[int],
    group: dist.ProcessGroup,
    scale: float | None,
    backend: str,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        query: This rank's queries, shape `[batch, tokens, heads, dim]`.
        key: This rank's keys.
        value: This rank's values.
        mask: For this rank's queries and the keys of all ranks, of four dims.
        is_causal: Whether each query sees only the keys up to its own; there is one key for each
            query then, and no mask.
        tokens: Number of keys on each rank.
        group: The ranks.
        scale: As for `attend`.
        backend: As for `attend`.

    Returns:
        Of the shape of `query`, with the last dim of `value`.
    """
    ranks, rank = len(tokens), dist.get_rank(group)
    starts = [0, *itertools.accumulate(tokens)]
    if mask is not None and mask.dtype != torch.bool:
        query, mask = _settled(query, mask)
    parts = _Parts(key, value, group)
    result = _Sum()
    for step in range(ranks):
        source = (rank - step) % ranks
        if step < ranks - 1:
            parts.pass_on(tokens[(source - 1) % ranks])
        if not is_causal or source <= rank:
            keys, values = parts.held()
            columns = mask
            if mask is not None and mask.shape[-1] > 1:
                columns = mask.narrow(-1, starts[source], tokens[source])
            result.add(
                *attend(
                    query.transpose(1, 2),
                    keys.transpose(1, 2),
                    values.transpose(1, 2),
                    mask=columns,
                    is_causal=is_causal and source == rank,  # all keys of earlier ranks are seen
                    scale=scale,
                    backend=backend,
                )
            )
        if step < ranks - 1:
            parts.arrive()
    return result.output(query.dtype).transpose(1, 2)


class _Parts:
    """The keys and values that this rank holds now, and those that are on their way to it."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._alike = key, value
        self._group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._after, self._before = (rank + 1) % ranks, (rank - 1) % ranks
        flat = [x.contiguous().view(-1).view(torch.uint8) for x in (key, value)]
        self._bytes = torch.cat(flat)  # one message a step
        self._tokens = key.shape[1]
        self._next = self._bytes, 0
        self._pending: list[dist.Work] = []

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values that are here."""
        found, rest = [], self._bytes
        for one in self._alike:
            shape = (one.shape[0], self._tokens, *one.shape[2:])
            size = math.prod(shape) * one.dtype.itemsize
            found.append(rest[:size].view(one.dtype).view(shape))
            rest = rest[size:]
        return found[0], found[1]

    def pass_on(self, tokens: int) -> None:
        """Begin to send what is here to the next rank, and to receive so many tokens' worth."""
        size = self._bytes.numel() // self._tokens * tokens
        self._next = self._bytes.new_empty(size), tokens
        operations = [
            dist.P2POp(dist.isend, self._bytes, group=self._group, group_peer=self._after),
            dist.P2POp(dist.irecv, self._next[0], group=self._group, group_peer=self._before),
        ]
        self._pending = dist.batch_isend_irecv(operations)

    def arrive(self) -> None:
        """Wait for it, and let go of what was here."""
        for work in self._pending:
            work.wait()
        self._bytes, self._tokens = self._next


class _Sum:
    """Outputs for some of the keys each, put together."""

    def __init__(self) -> None:
        self._output: torch.Tensor | None = None
        self._lse = torch.empty(0)

    def add(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in what came of some more keys."""
        output = output.to(lse.dtype)
        if self._output is None:
            self._output, self._lse = output, lse
            return
        both = torch.logaddexp(self._lse, lse)
        # where nothing was seen so far, what is not there must not count as no number
        base = both.masked_fill(both == -math.inf, 0)
        self._output = self._output * (self._lse - base).exp()[..., None]
        self._output += output * (lse - base).exp()[..., None]
        self._lse = both

    def output(self, dtype: torch.dtype) -> torch.Tensor:
        """The output for all keys."""
        assert self._output is not None
        return self._output.to(dtype)


def _settled(query: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same softmax with a mask whose largest entry of each query is zero.

    Far from zero a log-sum-exp has too few digits left to tell what is within it. A query that is
    hidden from all keys by a very large number weighs them by the mask alone, as it would whole.
    """
    top = mask.amax(-1, keepdim=True)
    settled = mask - top.masked_fill(top.isinf(), 0)
    drowned = ((top < DROWNING) & ~top.isinf()).transpose(1, 2)  # as [batch, tokens, heads, 1]
    return query.masked_fill(drowned, 0), settled
