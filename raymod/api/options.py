"""What can be asked of the ranks, the same for all calls, and what cannot be wrapped at all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from raymod import plans
from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError, UnsupportedError
from raymod.gang import Gang, Undecided, default_world_size
from raymod.module import RemoteModule
from raymod.weights import Offer

__all__ = ["Options", "check_module", "options"]

_Config = TypeVar("_Config", ParallelConfig, PrepareConfig, GangConfig)


@dataclass(frozen=True)
class Options:
    """What was asked of the ranks.

    Attributes:
        parallel: How the model is divided.
        prepare: What each rank does to it.
        gang: Where and how they run.
    """

    parallel: ParallelConfig
    prepare: PrepareConfig
    gang: GangConfig

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.parallel.world_size or default_world_size(self.gang)

    def degrees(self, module: nn.Module) -> Degrees:
        """The degrees for `module`, which may be a skeleton.

        Raises:
            UnsupportedError: A split that it has no plan for.
        """
        plan = plans.sequence_plan(module)
        degrees = self.parallel.degrees(
            sequence=plan is not None, default_world_size=self.world_size
        )
        if degrees.ulysses_degree > 1 and plan is None:
            raise UnsupportedError(
                f"ulysses_degree={degrees.ulysses_degree}: {type(module).__name__} has no plan "
                f"(`_cp_plan`) that says where its sequence can be cut. Use batch_degree, or "
                f"workers alone to let raymod choose."
            )
        return degrees

    def start(
        self, offer: Offer, degrees: Degrees | Undecided, module: nn.Module | None = None
    ) -> Gang:
        """A gang with what is on offer.

        Args:
            offer: The weights.
            degrees: How many ways along each split.
            module: The module, where this process has it or a skeleton.
        """
        by_batch = isinstance(degrees, Degrees) and degrees.batch_degree > 1
        is_chosen = by_batch and not self.parallel.has_degrees
        warnings = (plans.by_batch_only(module),) if is_chosen and module is not None else ()
        return Gang.start(
            config=self.gang,
            load=offer,
            degrees=degrees,
            parallel=self.parallel,
            prepare=self.prepare,
            warnings=warnings,
        )


def options(
    parallel: ParallelConfig | None,
    prepare: PrepareConfig | None,
    gang: GangConfig | None,
    **shorthand: int | None,
) -> Options:
    """What the user gave, checked.

    Args:
        parallel: The config, or None.
        prepare: The config, or None.
        gang: The config, or None.
        **shorthand: `workers` and degrees, instead of `parallel`.

    Raises:
        ConfigError: Something is of the wrong type, or said twice.
    """
    return Options(
        _parallel(parallel, **shorthand),
        _instance("prepare", prepare, PrepareConfig),
        _instance("gang", gang, GangConfig),
    )


def check_module(module: nn.Module) -> None:
    """Refuse what cannot run on ranks whatever is asked.

    Raises:
        ConfigError: It is wrapped already.
        UnsupportedError: It is compiled or scripted.
    """
    if isinstance(module, RemoteModule):
        raise ConfigError(
            f"this {type(module).__name__} is wrapped already; raymod.unwrap it first to change "
            f"how it runs."
        )
    if hasattr(module, "_orig_mod"):
        raise UnsupportedError(
            "the module was compiled with torch.compile, and compiled code cannot move to other "
            "processes: wrap the module from before (its `_orig_mod`)."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            "a TorchScript module cannot be split; wrap the Python module it was made from."
        )


def _parallel(parallel: ParallelConfig | None, **shorthand: int | None) -> ParallelConfig:
    given: dict[str, Any] = {name: value for name, value in shorthand.items() if value is not None}
    if parallel is None:
        return ParallelConfig(**given)
    if given:
        raise ConfigError(
            f"parallel=ParallelConfig(...) and {', '.join(given)} say the same thing twice; put "
            f"all of it into one."
        )
    return _instance("parallel", parallel, ParallelConfig)


def _instance(name: str, value: _Config | None, kind: type[_Config]) -> _Config:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a raymod.{kind.__name__}, not a {type(value).__name__}")
    return value
