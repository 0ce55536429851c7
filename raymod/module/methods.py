"""The class of a stub: the original's, with the methods that the table decides differently."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from raymod.module.adapters import load_lora_adapter
from raymod.module.surface import HELPERS, IGNORED, MIRRORED, REFUSED, refusal

__all__ = ["stub_class"]

logger = logging.getLogger(__name__)

Stub = TypeVar("Stub", bound=nn.Module)


@functools.lru_cache(maxsize=64)
def stub_class(cls: type[nn.Module], base: type[Stub]) -> type[Stub]:
    """A subclass of `cls` and of the stubs' `base`, which passes for `cls` by name."""
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "forward": _forward_like(cls, base),
    }
    for name in dir(cls):
        made = _method(cls, base, name)
        if made is not None:
            namespace[name] = made
    made_class = types.new_class(cls.__name__, (base, cls), {}, lambda ns: ns.update(namespace))
    found: type[Stub] = made_class
    return found


def _method(cls: type[nn.Module], base: type[nn.Module], name: str) -> Callable[..., Any] | None:
    """What the table makes of a method; None where it is inherited, or `base` has its own."""
    if name in REFUSED:
        return refusal(cls.__name__, name)
    if name in vars(base):
        return None
    if name in _SPECIAL:
        return functools.wraps(getattr(cls, name))(_SPECIAL[name])
    if name in MIRRORED:
        return _mirrored(getattr(cls, name), name)
    if name in HELPERS:
        return _helper(getattr(cls, name), name)
    if name in IGNORED:
        return _ignored(getattr(cls, name), name)
    return None


def _forward_like(cls: type[nn.Module], base: type[nn.Module]) -> Callable[..., Any]:
    """The stubs' `forward` with the signature of `cls`, which some pipelines look at."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    return forward


def _mirrored(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    how = MIRRORED[name]

    @functools.wraps(method)
    def mirrored(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = {"group": how.group, "local": how.local, "supersedes": how.supersedes}
        return self._change(f"do {name}", name, *args, options=options, **kwargs)

    return mirrored


def _helper(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def helper(self: Any, *args: Any, **kwargs: Any) -> Any:
        sides = self._open(f"do {name}").sides
        if sides.freed is None:
            return getattr(sides.original, name)(*args, **kwargs)
        return sides.run(name, *args, **kwargs)

    return helper


def _ignored(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def ignored(self: Any, *args: Any, **kwargs: Any) -> None:
        logger.info("%s.%s() has nothing to do: %s", type(self).__name__, name, IGNORED[name])

    return ignored


def _reset_stateful_cache(self: Any, recurse: bool = True) -> None:
    """Forget what step caches hold, on every rank; pipelines do so after each run."""
    if not self.closed:  # a pipeline that cleans up after a failure
        self._raymod.sides.run("_reset_stateful_cache", recurse=recurse)


def _enable_cache(self: Any, config: Any) -> None:
    """Turn a step cache on, on every rank; the driver's module has none."""
    if self.is_cache_enabled:
        raise ValueError(
            f"caching is enabled already, with {type(self._cache_config).__name__}; "
            f"disable_cache() first"
        )
    options = {"group": "cache", "local": False, "supersedes": True}
    self._change("enable a cache", "enable_cache", config, options=options)
    self.__dict__["_cache_config"] = config


def _disable_cache(self: Any) -> None:
    """Turn the step cache off, on every rank."""
    options = {"group": "cache", "local": False, "supersedes": True}
    self._change("disable its cache", "disable_cache", options=options)
    self.__dict__["_cache_config"] = None


@contextmanager
def _cache_context(self: Any, name: str, **fields: Any) -> Iterator[None]:
    """Mark the calls inside as of one kind ("cond", "uncond"), for the ranks' step caches.

    Holds for this thread. Name and fields travel with each call, which every rank makes in its
    module's own `cache_context`; inside of another context, in both.
    """
    state = self._raymod
    outer = state.entered
    state.contexts.entered = (*outer, (name, fields))
    try:
        yield
    finally:
        state.contexts.entered = outer


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_reset_stateful_cache": _reset_stateful_cache,
    "cache_context": _cache_context,
    "disable_cache": _disable_cache,
    "enable_cache": _enable_cache,
    "load_lora_adapter": load_lora_adapter,
}
