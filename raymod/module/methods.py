"""The class of a stub: the original's, with the methods that the table decides differently."""

from __future__ import annotations

import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
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
        "forward": _Forward(cls, base),
    }
    for name in dir(cls):
        made = _method(cls, base, name)
        if made is not None:
            namespace[name] = made
    namespace["__raymod_stands_for__"] = cls
    meta = types.new_class("StubType", (_PassesFor, type(cls)))
    made_class = types.new_class(
        cls.__name__, (base, cls), {"metaclass": meta}, lambda ns: ns.update(namespace)
    )
    found: type[Stub] = made_class
    return found


class _PassesFor(type):
    """The stub's class is equal to the original's: `from_pipe` looks for exact types."""

    __raymod_stands_for__: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__raymod_stands_for__

    def __hash__(cls) -> int:
        return hash(cls.__raymod_stands_for__)


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


class _Forward:
    """The stubs' `forward`, with the signature of the original's, which some pipelines look at.

    Code around a stub may be compiled, and the stub itself by mistake. There is nothing to compile
    in it: what it does is sent away. So it hides from the compiler, which else would try.
    """

    def __init__(self, cls: type[nn.Module], base: type[nn.Module]) -> None:
        @functools.wraps(cls.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return base.forward(self, *args, **kwargs)

        self.function = forward

    def __get__(self, stub: Any, owner: Any = None) -> Callable[..., Any]:
        if stub is None:
            return self.function
        bound = types.MethodType(self.function, stub)
        if "torch._dynamo" not in sys.modules:  # nothing can be compiling
            return bound
        state = stub._raymod
        if not torch.compiler.is_compiling() and _asked_by_torch_compile():
            warnings.warn(
                f"torch.compile of a raymod stub ({type(stub).__name__}) changes nothing: the "
                f"module runs on other processes, where this does not reach. It is harmless; "
                f"raymod.PrepareConfig says what the ranks do to their module.",
                UserWarning,
                stacklevel=2,
            )
        if state.uncompiled is None:
            disable: Any = torch.compiler.disable
            state.uncompiled = disable(bound)
        found: Callable[..., Any] = state.uncompiled
        return found


def _asked_by_torch_compile() -> bool:
    """Whether the caller's caller is what torch.compile makes of a module, being made."""
    return sys._getframe(2).f_code.co_name == "_initialize"


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
    sent = self._open("enable a cache").sides.values.take(config)
    self._change("enable a cache", "enable_cache", sent, options=options)
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
