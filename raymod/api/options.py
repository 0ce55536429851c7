"""What can be asked of the ranks, the same for all calls, and what cannot be wrapped at all."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from raymod import plans
from raymod.calls import pack
from raymod.calls.values import DriverValues
from raymod.config import (
    Degrees,
    GangConfig,
    ParallelConfig,
    PrepareConfig,
    check_ring_backend,
)
from raymod.errors import ConfigError, UnsupportedError
from raymod.gang import Gang, HereGang, Tenant, Undecided, default_world_size
from raymod.module import RemoteModule
from raymod.weights import Offer

__all__ = ["Options", "check_module", "check_prepare", "options"]

_Config = TypeVar("_Config", ParallelConfig, PrepareConfig, GangConfig)


@dataclass(frozen=True)
class Options:
    """What was asked of the ranks.

    Attributes:
        parallel: How the model is divided.
        prepare: What each rank does to it.
        gang: Where and how they run.
        values: What only this process knows, and sends with each call.
        shared: The gang of another stub, to run on its ranks.
    """

    parallel: ParallelConfig
    prepare: PrepareConfig
    gang: GangConfig
    values: DriverValues
    shared: Gang | None = None

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        if self.shared is not None:
            return self.parallel.world_size or self.shared.world_size
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
        if degrees.sequence_degree > 1 and plan is None:
            raise UnsupportedError(
                f"{degrees}: {type(module).__name__} has no plan "
                f"(`_cp_plan`) that says where its sequence can be cut. Use batch_degree, or "
                f"workers alone to let raymod choose."
            )
        return degrees

    def start(
        self,
        offer: Offer,
        degrees: Degrees | Undecided,
        module: nn.Module | None = None,
        *,
        keep_local: bool = True,
    ) -> Gang | HereGang | Tenant:
        """A gang with what is on offer.

        Args:
            offer: The weights.
            degrees: How many ways along each split.
            module: The module, where this process has it or a skeleton.
            keep_local: Whether this process keeps what it has.
        """
        if self.parallel.workers == 0:
            return HereGang.start(
                load=offer, degrees=degrees, parallel=self.parallel, prepare=self.prepare
            )
        by_batch = isinstance(degrees, Degrees) and degrees.batch_degree > 1
        is_chosen = by_batch and not self.parallel.has_degrees
        warnings = (plans.by_batch_only(module),) if is_chosen and module is not None else ()
        again = offer.again if keep_local or not offer.from_here else None
        if self.shared is not None:
            if isinstance(degrees, Undecided):
                raise ConfigError("a module that only the ranks load needs a gang of its own")
            return Tenant.start(
                self.shared,
                load=offer,
                degrees=degrees,
                parallel=self.parallel,
                prepare=self.prepare,
                timeout_s=self.gang.start_timeout_s,
                again=again,
            )
        return Gang.start(
            config=self.gang,
            load=offer,
            degrees=degrees,
            parallel=self.parallel,
            prepare=self.prepare,
            warnings=warnings,
            again=again,
        )


def options(
    parallel: ParallelConfig | None,
    prepare: PrepareConfig | None,
    gang: GangConfig | RemoteModule | None,
    **shorthand: int | None,
) -> Options:
    """What the user gave, checked.

    Args:
        parallel: The config, or None.
        prepare: The config, or None.
        gang: The config, or a stub whose gang is to be shared, or None.
        **shorthand: `workers` and degrees, instead of `parallel`.

    Raises:
        ConfigError: Something is of the wrong type, or said twice.
    """
    shared: Gang | None = None
    config: Any = gang
    wanted_parallel = _parallel(parallel, **shorthand)
    if wanted_parallel.workers == 0 and gang is not None:
        raise ConfigError("workers=0 is one rank in this process: there is no gang= to configure")
    if isinstance(gang, RemoteModule):
        shared, config = _gang_of(gang), None
    wanted = _instance("prepare", prepare, PrepareConfig)
    check_ring_backend(wanted_parallel.ring_degree, wanted.attention_backend)
    values = DriverValues()
    return Options(
        wanted_parallel,
        replace(wanted, cache=values.take(wanted.cache)),
        _instance("gang", config, GangConfig),
        values,
        shared,
    )


def _gang_of(stub: RemoteModule) -> Gang:
    if stub.closed or stub.gang.closed:
        raise ConfigError(
            f"gang= is a {type(stub).__name__} that was closed; its ranks are gone, so nothing can "
            f"run on them."
        )
    gang: Gang | HereGang | Tenant = stub.gang
    if isinstance(gang, HereGang):
        raise ConfigError(
            "gang= is a stub with workers=0, which has no ranks to share: wrap this one with "
            "workers=0 as well."
        )
    return gang.gang if isinstance(gang, Tenant) else gang


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


def check_prepare(module: nn.Module, prepare: PrepareConfig) -> None:
    """Refuse what a module cannot be prepared with, before there are ranks.

    Args:
        module: The module, or a skeleton of it.
        prepare: What was asked.

    Raises:
        ConfigError: It has no such thing, or a package is missing.
    """
    name = type(module).__name__
    pack(prepare, what="prepare")  # what cannot travel says so here
    if prepare.attention_backend is not None:
        _check_backend(module, prepare.attention_backend)
    if prepare.cache is not None:
        kind = type(prepare.cache)
        if not hasattr(module, "enable_cache"):
            raise ConfigError(
                f"cache={kind.__name__}: {name} has no enable_cache, so no step cache"
            )
        if not kind.__module__.startswith("diffusers.hooks."):
            raise ConfigError(
                f"cache must be one of diffusers' cache configs, such as "
                f"diffusers.FirstBlockCacheConfig(threshold=0.1), not {kind.__name__}"
            )
    if prepare.quantize is not None:
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError("quantize needs torchao: pip install 'raymod[torchao]'")
        done = {type(p).__name__ for p in module.parameters() if "torchao" in type(p).__module__}
        if done or getattr(module, "hf_quantizer", None) is not None:
            raise ConfigError(f"quantize: the weights of this {name} are quantized already")


def _check_backend(module: nn.Module, backend: str) -> None:
    if not hasattr(module, "set_attention_backend"):
        raise ConfigError(
            f"attention_backend={backend!r}: {type(module).__name__} has no set_attention_backend"
        )
    from diffusers.models.attention_dispatch import AttentionBackendName

    names = [member.value for member in AttentionBackendName]
    if backend not in names:
        raise ConfigError(
            f"attention_backend={backend!r} is none that diffusers has: {', '.join(sorted(names))}"
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
