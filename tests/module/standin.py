"""Ranks in this process: private copies of the module, called as a gang would call them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymod.calls import Packed, pack, unpack
from raymod.calls.modes import MODES, in_modes
from raymod.errors import GangError, GangFailedError, RankError, RankFailure
from raymod.module import RemoteModule, make_stub


@dataclass(frozen=True)
class Report:
    split: str = "2 ranks: ulysses_degree=2"


class Worker:
    """One rank, as functions of a change see it."""

    node = "here"

    def __init__(self, rank: int, module: nn.Module) -> None:
        self.rank = rank
        self.module = module
        self.undo: Any = None
        self.forgotten = 0

    @contextmanager
    def unsplit(self) -> Iterator[nn.Module]:
        self.forgotten += 1
        yield self.module


class Ranks:
    """As many ranks as asked for, each with its own copy; rank 0's is `module`.

    What goes to them is packed and copied for each, as it would be on its way to a process.
    """

    def __init__(self, module: nn.Module, count: int = 1) -> None:
        self.workers = [Worker(rank, copy.deepcopy(module)) for rank in range(count)]
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.contexts: list[Any] = []
        self.sent_bytes = 0
        self.closes = 0
        self.report = Report()
        self.failure: GangError | None = None
        self.on_rebuilt: Callable[[Any], None] | None = None
        self.last_call = None

    @property
    def module(self) -> nn.Module:
        return self.workers[0].module

    @property
    def forgotten(self) -> int:
        return self.workers[0].forgotten

    def call(self, args: Any, kwargs: Any, contexts: Any = ()) -> Any:
        self.calls.append((args, kwargs))
        self.contexts.append(contexts)
        outputs = []
        for worker in self.workers:
            with torch.no_grad(), ExitStack() as stack:
                for name, fields in contexts:
                    if name == MODES:
                        stack.enter_context(in_modes(fields))
                        continue
                    stack.enter_context(worker.module.cache_context(name, **fields))
                outputs.append(worker.module(*args, **kwargs))
        return outputs[0]

    def call_all(self, method: Any, *args: Any, reply_rank: int | None = None, **kw: Any) -> Any:
        if self.failure is not None:
            raise GangFailedError("the gang ended in an earlier failure") from self.failure
        packed = pack((args, kw)).plain()
        self.sent_bytes += packed.nbytes
        replies, failures = [], []
        for worker in self.workers:
            copies = Packed(packed.skeleton, tuple(tensor.clone() for tensor in packed.tensors))
            args, kw = unpack(copies)
            try:
                replies.append(method(worker, *args, **kw))
            except Exception as error:
                failures.append(RankFailure.of(error, rank=worker.rank, node="here"))
        if failures:
            raise RankError.from_failures(failures)
        return replies if reply_rank is None else replies[reply_rank : reply_rank + 1]

    def start_anew(self, module: nn.Module) -> None:
        """As a gang does that has lost its ranks: with the module from its source."""
        self.workers = [Worker(w.rank, copy.deepcopy(module)) for w in self.workers]
        assert self.on_rebuilt is not None
        self.on_rebuilt(self)

    def fail(self, error: GangError) -> None:
        self.failure = error

    def close(self) -> None:
        self.closes += 1


def stub_of(
    module: nn.Module, count: int = 1, *, ranks: Ranks | None = None, **options: Any
) -> tuple[RemoteModule, Ranks]:
    """A stub of `module` on ranks of this process."""
    ranks = ranks or Ranks(module, count)
    stub = make_stub(module, ranks, device=torch.device("cpu"), **options)
    return stub, ranks
