"""The fixed order in which a rank's module is prepared.

Threads, device, attention backend, quantize, the user's own step, split, cache, compile, warm up.
Adapters are in the weights by then. The order matters: the split looks for the layers that are
there in the end, a cache must see what the split leaves to this rank, and what is compiled must
not change any more.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError
from raymod.machine import available_cores
from raymod.parallel import (
    Mechanism,
    Mesh,
    SequenceContext,
    Share,
    Split,
    Splitter,
    apply_context,
    place,
    remove,
)
from raymod.plans import by_batch_only, sequence_plan
from raymod.prepare.compiling import compile_module, forget_compiled
from raymod.prepare.quantize import quantize

__all__ = ["PrepareReport", "Share", "SplitModule", "prepare"]

# How long a rank may be behind another here, with weights of any size still on their way.
MAX_WAIT_S = 1800.0


@dataclass(frozen=True)
class PrepareReport:
    """What was done to the module of one rank.

    Attributes:
        degrees: The degrees that are in effect.
        split: How calls are divided, in words.
        hooks: Number of places where tokens are cut or gathered.
        attentions: Number of attention processors that exchange tokens between ranks.
        threads: Torch threads on CPU.
        warnings: What the user should hear.
    """

    degrees: Degrees
    split: str
    hooks: int
    attentions: int
    threads: int
    warnings: tuple[str, ...] = ()


class SplitModule:
    """A module ready to be called on every rank at once.

    Attributes:
        module: The module itself.
        report: What was done to it.
    """

    def __init__(
        self,
        module: nn.Module,
        splitter: Splitter,
        report: PrepareReport,
        context: SequenceContext | None,
    ) -> None:
        self.module = module
        self.report = report
        self._splitter = splitter
        self._context = context

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Share:
        """Run one call, whose arguments are the same on every rank.

        Raises:
            SplitError: A split that was asked for does not reproduce the module's own output.
        """
        return self._splitter(args, kwargs)

    def resume(self, calls: int) -> None:
        """Draw random numbers as after that many calls."""
        self._splitter.resume(calls)

    def reset_caches(self) -> None:
        """Forget what step caches hold."""
        self._splitter.reset_caches()

    @contextmanager
    def unsplit(self) -> Iterator[nn.Module]:
        """The module without cuts and gathers, for what changes it; they are placed anew after.

        A change may replace the parts that they hang on: an adapter wraps a layer, fused
        projections get another processor. The next call of each kind is checked again.
        """
        if self._context is not None:
            remove(self._context)
        try:
            yield self.module
        except BaseException:
            with suppress(Exception):  # a change by half; whoever takes it back comes here again
                self._split_again()
            raise
        self._split_again()

    def _split_again(self) -> None:
        self._splitter.forget()
        forget_compiled(self.module)
        if self._context is not None:
            plan = sequence_plan(self.module)
            assert plan is not None  # it had one when the context was made
            place(self.module, plan, self._context)


def prepare(
    module: nn.Module,
    *,
    degrees: Degrees,
    parallel: ParallelConfig,
    prepare: PrepareConfig,
    device: torch.device,
    rank_info: Any = None,
) -> SplitModule:
    """Make a rank's module ready; every rank must do so at the same time.

    Args:
        module: The module, with its weights, the same on every rank. It is changed in place.
        degrees: The degrees to use; their product is the number of ranks.
        parallel: What the user asked for: whether degrees were named, whether to check.
        prepare: The options of this step.
        device: Where the rank computes.
        rank_info: What `prepare.extra` is given beside the module.

    Raises:
        ConfigError: The module cannot be split this way, or cannot do what `prepare` asks.
    """
    mesh = Mesh(degrees, device)
    threads = _set_threads(prepare.threads, mesh)
    module = module.to(device)
    done: list[str] = []
    if prepare.attention_backend is not None:
        _set_backend(module, prepare.attention_backend)
        done.append(f"attention by {prepare.attention_backend}")
    if prepare.quantize is not None:
        count = quantize(module, prepare.quantize)
        done.append(f"{count} weights quantized by {type(prepare.quantize).__name__}")
    if prepare.extra is not None:
        module = _changed(module, prepare, rank_info).to(device)
    context = _split(module, mesh)
    if prepare.cache is not None:
        _enable_cache(module, prepare.cache)
        done.append(f"cached by {type(prepare.cache).__name__}")
    if prepare.compiles:
        done.append(
            compile_module(module, prepare.compile, rank=mesh.rank if mesh.world_size > 1 else None)
        )
    mechanisms: dict[Split, Mechanism] = {} if context is None else {Split.PLAN: context}
    splitter = Splitter(
        module, mesh, mechanisms, asked=parallel.has_degrees, verify=parallel.verify
    )
    report = PrepareReport(
        degrees=degrees,
        split="; ".join([_words(degrees, context), *done]),
        hooks=context.hooks if context else 0,
        attentions=context.attentions if context else 0,
        threads=threads,
        warnings=tuple(_warnings(module, degrees, parallel)),
    )
    ready = SplitModule(module, splitter, report, context)
    if prepare.warm_up is not None:
        _warm_up(ready, prepare.warm_up)
    return ready


def _changed(module: nn.Module, prepare: PrepareConfig, rank_info: Any) -> nn.Module:
    assert prepare.extra is not None
    changed = prepare.extra(module, rank_info)
    if not isinstance(changed, nn.Module):
        raise ConfigError(
            f"prepare.extra must return the module, not {type(changed).__name__}; "
            f"does it lack a return?"
        )
    return changed


def _method(module: nn.Module, name: str, option: str) -> Any:
    """A method that an option needs."""
    method = getattr(module, name, None)
    if method is None:
        raise ConfigError(f"{option}: {type(module).__name__} has no {name}")
    return method


def _set_backend(module: nn.Module, name: str) -> None:
    _method(module, "set_attention_backend", f"attention_backend={name!r}")(name)


def _enable_cache(module: nn.Module, config: Any) -> None:
    _method(module, "enable_cache", f"cache={type(config).__name__}")(config)


def _warm_up(ready: SplitModule, arguments: Mapping[str, Any]) -> None:
    """One call whose output nobody sees, and of which step caches keep nothing."""
    context: Any = getattr(ready.module, "cache_context", None)
    with nullcontext() if context is None else context("warm up"):
        ready((), dict(arguments))
        ready.reset_caches()


def _split(module: nn.Module, mesh: Mesh) -> SequenceContext | None:
    if mesh.degrees.sequence_degree == 1:
        return None
    plan = sequence_plan(module)
    if plan is None:
        raise ConfigError(
            f"{mesh.degrees}: {type(module).__name__} does not say where it can be cut (it has no "
            f"_cp_plan). Use batch_degree={mesh.world_size}."
        )
    return apply_context(module, plan, mesh)


def _words(degrees: Degrees, context: SequenceContext | None) -> str:
    if degrees.world_size == 1:
        return "one rank, no split"
    splits = []
    if degrees.batch_degree > 1:
        splits.append(f"by batch over {degrees.batch_degree}")
    if context is not None:
        splits.append(
            f"by sequence over {degrees.sequence_degree}{' in a ring' * (degrees.ring_degree > 1)} "
            f"({context.hooks} cuts and gathers, {context.attentions} attentions)"
        )
    return " and ".join(splits)


def _warnings(module: nn.Module, degrees: Degrees, parallel: ParallelConfig) -> list[str]:
    if parallel.has_degrees or degrees.batch_degree == 1:
        return []
    return [by_batch_only(module)]


def _set_threads(wanted: int | None, mesh: Mesh) -> int:
    """Give each rank of a host its share of the cores; Ray sets one thread a rank."""
    if wanted is None:
        host = socket.gethostname()
        sharing = mesh.said(host, limit_s=MAX_WAIT_S).count(host)
        wanted = max(1, int(available_cores() / sharing))
    torch.set_num_threads(wanted)
    return wanted
