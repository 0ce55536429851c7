"""Put a stub where a module is, and the module back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from raymod import weights as weight_sources
from raymod.api import offloading
from raymod.api.options import Options, check_module, check_prepare, options
from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError
from raymod.module import RemoteModule, make_stub, restore_local

__all__ = ["unwrap", "wrap"]

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
    weights: weight_sources.Source = "auto",
    gang: GangConfig | RemoteModule | None = None,
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
        weights: What the ranks get. `"auto"`: the module as it stands here; weights that are
            still unchanged pages of the file they were loaded from are mapped by the ranks.
            `"memory"`: the same, all of it sent. `"checkpoint"`, or the path of a folder or a
            `.safetensors` file: each rank maps the checkpoint, whatever the weights are here; what
            it lacks is sent. A function without arguments that returns the module: run on each
            rank.
        gang: Where and how the ranks run, and the limits of every wait. Or another stub: then the
            module runs on that one's ranks, in turns with it, and ends with its gang.
        keep_local: Keep the local weights on the CPU. False frees them; `unwrap` fetches them
            back.

    Returns:
        The stub, which is an instance of the module's class and a context manager that closes
        the gang.

    Raises:
        ConfigError: Something that was asked cannot be; raised before any rank exists.
        WeightsError: The weights cannot be moved.
        GangStartError: The ranks did not become ready; nothing of them is left. Where a rank
            raised while it loaded or prepared the module, also a RankError and an instance of what
            it raised, such as a WeightsError.
    """
    place = _find(target, component)
    asked = options(
        parallel,
        prepare,
        gang,
        workers=workers,
        batch_degree=batch_degree,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        tp_degree=tp_degree,
    )
    module = place.module
    check_module(module)
    check_prepare(module, asked.prepare)
    if asked.prepare.quantize is not None and not keep_local:
        raise ConfigError(
            "keep_local=False with quantize would leave nobody with the weights as they are: the "
            "ranks keep the quantized ones only. Use keep_local=True, or raymod.from_pretrained."
        )
    degrees = asked.degrees(module)
    put_back = offloading.detach(module)
    try:
        return _wrapped_in_place(place, asked, degrees, weights, keep_local, put_back)
    except BaseException:
        put_back()
        raise


def _wrapped_in_place(
    place: _Place,
    asked: Options,
    degrees: Degrees,
    weights: weight_sources.Source,
    keep_local: bool,
    put_back: Callable[[], None],
) -> RemoteModule:
    module = place.module
    device = _device_of(module)
    with weight_sources.offer(weights, module) as offer:
        started = asked.start(offer, degrees, module, keep_local=keep_local)
    try:
        if any(parameter.is_meta for parameter in module.parameters()):
            freed: weight_sources.Freed | None = weight_sources.vacant(module)
        else:
            freed = None if keep_local else weight_sources.free(module)
        stub = make_stub(
            module,
            started,
            device=device,
            freed=freed,
            from_local=freed is None and weights in ("auto", "memory"),
            put_back=put_back,
            cache=asked.prepare.cache,
            values=asked.values,
        )
        place.put(stub)
    except BaseException:
        started.close()
        raise
    return stub


def unwrap(target: Any, component: str | None = None) -> nn.Module:
    """Put the module from before back in place and end its ranks.

    Args:
        target: The pipeline, or a stub; who put a stub in place puts there what is returned.
        component: Name of the component. None: the one that is wrapped.

    Returns:
        The very object that was wrapped, its weights fetched back if `keep_local=False` freed
        them. For a stub of `from_pretrained` or `from_loader`, a module with the ranks' weights.

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


def _device_of(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device
