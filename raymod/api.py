"""The calls that users write: `wrap` and `unwrap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from raymod import plans
from raymod import weights as weight_sources
from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError, UnsupportedError
from raymod.gang import Gang, default_world_size
from raymod.module import RemoteModule, make_stub, restore_local

__all__ = ["unwrap", "wrap"]

_Config = TypeVar("_Config", ParallelConfig, PrepareConfig, GangConfig)

DEFAULT_COMPONENTS = ("transformer", "unet")


def wrap(
    target: Any,
    component: str | None = None,
    *,
    workers: int | None = None,
    batch_degree: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    tp_degree: int | None = None,
    parallel: ParallelConfig | None = None,
    prepare: PrepareConfig | None = None,
    weights: str | Callable[[], nn.Module] = "auto",
    gang: GangConfig | None = None,
    keep_local: bool = True,
) -> RemoteModule:
    """Run a pipeline's transformer, or any module, on a gang of ranks.

    In a pipeline the component is replaced by a stub, and the pipeline is used as before. Of a
    plain module only the stub is returned, for the caller to put in place.

    Args:
        target: A diffusers pipeline or any `nn.Module`.
        component: Name of the pipeline's component. None: `transformer`, else `unet`.
        workers: Number of ranks. Alone, raymod chooses the split: by sequence where the model has
            a plan, else by batch. None and no degree: all GPUs of the cluster, or 2 ranks on a
            machine without any.
        batch_degree: As in `ParallelConfig`.
        ulysses_degree: As in `ParallelConfig`.
        ring_degree: As in `ParallelConfig`.
        tp_degree: As in `ParallelConfig`.
        parallel: Number of ranks and degrees as one object; excludes the six above.
        prepare: What each rank does to its module before it serves.
        weights: `"auto"` or `"memory"`: the module as it stands here. A function without
            arguments that returns the module: run on each rank instead of sending weights.
        gang: Where and how the ranks run, and the limits of every wait.
        keep_local: Keep the local weights on the CPU. False frees them; `unwrap` fetches them
            back.

    Returns:
        The stub, which is an instance of the module's class and a context manager that closes
        the gang.

    Raises:
        ConfigError: Something that was asked cannot be; raised before any rank exists.
        WeightsError: The weights cannot be moved.
        GangStartError: The ranks did not become ready; nothing of them is left.
        RankError: A rank raised while it loaded or prepared the module.
    """
    place = _find(target, component)
    wanted = _parallel(
        parallel,
        workers=workers,
        batch_degree=batch_degree,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        tp_degree=tp_degree,
    )
    prepared = _instance("prepare", prepare, PrepareConfig)
    config = _instance("gang", gang, GangConfig)
    _check_module(place.module)
    size = wanted.world_size or default_world_size(config)
    degrees = _degrees(place.module, wanted, size)
    device = _device_of(place.module)
    with weight_sources.offer(weights, place.module) as offer:
        started = Gang.start(
            config=config, load=offer, degrees=degrees, parallel=wanted, prepare=prepared
        )
    try:
        freed = None if keep_local else weight_sources.free(place.module)
        stub = make_stub(place.module, started, report=started.report, device=device, freed=freed)
        place.put(stub)
    except BaseException:
        started.close()
        raise
    return stub


def unwrap(target: Any, component: str | None = None) -> nn.Module:
    """Put the module from before back in place and end its ranks.

    Args:
        target: The pipeline, or the stub of a plain module.
        component: Name of the component. None: the one that is wrapped.

    Returns:
        The very object that was wrapped, its weights fetched back if `keep_local=False` freed
        them.

    Raises:
        ConfigError: Nothing is wrapped there.
        WeightsError: The weights were freed and the ranks that held them are gone. The stub stays
            in place.
    """
    if isinstance(target, RemoteModule):
        place = _Place(None, None, target)
    else:
        place = _Place(target, *_wrapped(target, component))
    stub = place.module
    assert isinstance(stub, RemoteModule)
    original = restore_local(stub)
    place.put(original)
    stub.close()
    return original


class _Place:
    """Where the module stands: a component of a pipeline, or nowhere."""

    def __init__(self, pipe: Any, name: str | None, module: nn.Module) -> None:
        self.pipe = pipe
        self.name = name
        self.module = module

    def put(self, module: nn.Module) -> None:
        if self.pipe is not None and self.name is not None:
            setattr(self.pipe, self.name, module)


def _find(target: Any, component: str | None) -> _Place:
    if isinstance(target, nn.Module):
        if component is not None:
            raise ConfigError(
                f"component={component!r} names a part of a pipeline, but the target is a module "
                f"({type(target).__name__}); leave it out."
            )
        return _Place(None, None, target)
    components = _components(target)
    name = component if component is not None else _default_component(target, components)
    if name not in components:
        raise ConfigError(
            f"{type(target).__name__} has no component {name!r}; it has "
            f"{', '.join(sorted(components))}."
        )
    module = components[name]
    if module is None:
        raise ConfigError(f"component {name!r} of this {type(target).__name__} is None")
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"component {name!r} is a {type(module).__name__}; only an nn.Module can be wrapped."
        )
    return _Place(target, name, module)


def _components(target: Any) -> Mapping[str, Any]:
    components = getattr(target, "components", None)
    if not isinstance(components, Mapping):
        raise ConfigError(
            f"the target must be a diffusers pipeline or an nn.Module, not a "
            f"{type(target).__name__}"
        )
    return components


def _default_component(target: Any, components: Mapping[str, Any]) -> str:
    for name in DEFAULT_COMPONENTS:
        if components.get(name) is not None:
            return name
    modules = [name for name, value in components.items() if isinstance(value, nn.Module)]
    raise ConfigError(
        f"{type(target).__name__} has no {' or '.join(DEFAULT_COMPONENTS)}; name the component: "
        f"one of {', '.join(sorted(modules)) or 'none, it has no modules'}."
    )


def _wrapped(target: Any, component: str | None) -> tuple[str, RemoteModule]:
    components = _components(target)
    stubs = {name: value for name, value in components.items() if isinstance(value, RemoteModule)}
    if component is None and len(stubs) == 1:
        return next(iter(stubs.items()))
    if component is None and stubs:
        raise ConfigError(f"several components are wrapped, name one: {', '.join(sorted(stubs))}")
    if component is None or component not in stubs:
        what = f"component {component!r}" if component is not None else "no component"
        raise ConfigError(
            f"{what} of this {type(target).__name__} is {'not ' if component else ''}wrapped"
        )
    return component, stubs[component]


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


def _check_module(module: nn.Module) -> None:
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


def _degrees(module: nn.Module, wanted: ParallelConfig, size: int) -> Degrees:
    plan = plans.sequence_plan(module)
    degrees = wanted.degrees(sequence=plan is not None, default_world_size=size)
    if degrees.ulysses_degree > 1 and plan is None:
        raise UnsupportedError(
            f"ulysses_degree={degrees.ulysses_degree}: {type(module).__name__} has no plan "
            f"(`_cp_plan`) that says where its sequence can be cut. Use batch_degree, or workers "
            f"alone to let raymod choose."
        )
    return degrees


def _device_of(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
