"""What a rank does to its module before it serves, always in the same order.

Threads, the user's own step, the device, the split. The order matters: the user's step may replace
layers, and the split looks for the ones that are there in the end.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError
from raymod.machine import available_cores
from raymod.parallel import Mesh, SequenceContext, Share, Splitter, apply_context, place, remove
from raymod.plans import by_batch_only, sequence_plan

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
) -> SplitModule:
    """Make a rank's module ready; every rank must do so at the same time.

    Args:
        module: The module, with its weights, the same on every rank. It is changed in place.
        degrees: The degrees to use; their product is the number of ranks.
        parallel: What the user asked for: whether degrees were named, whether to check.
        prepare: The options of this step.
        device: Where the rank computes.

    Raises:
        ConfigError: The module cannot be split this way, or `prepare.extra` did not return a
            module.
    """
    mesh = Mesh(degrees, device)
    threads = _set_threads(prepare.threads, mesh)
    if prepare.extra is not None:
        module = _changed(module, prepare)
    module = module.to(device)
    context = _split(module, mesh)
    splitter = Splitter(module, mesh, context, asked=parallel.has_degrees, verify=parallel.verify)
    report = PrepareReport(
        degrees=degrees,
        split=_words(degrees, context),
        hooks=context.hooks if context else 0,
        attentions=context.attentions if context else 0,
        threads=threads,
        warnings=tuple(_warnings(module, degrees, parallel)),
    )
    return SplitModule(module, splitter, report, context)


def _changed(module: nn.Module, prepare: PrepareConfig) -> nn.Module:
    assert prepare.extra is not None
    changed = prepare.extra(module)
    if not isinstance(changed, nn.Module):
        raise ConfigError(
            f"prepare.extra must return the module, not {type(changed).__name__}; "
            f"does it lack a return?"
        )
    return changed


def _split(module: nn.Module, mesh: Mesh) -> SequenceContext | None:
    if mesh.degrees.ulysses_degree == 1:
        return None
    plan = sequence_plan(module)
    if plan is None:
        raise ConfigError(
            f"ulysses_degree={mesh.degrees.ulysses_degree}: {type(module).__name__} does not say "
            f"where it can be cut (it has no _cp_plan). Use batch_degree={mesh.world_size}."
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
            f"by sequence over {degrees.ulysses_degree} "
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
