"""Importing what the user's module is made of, without what a rank may never need.

`import diffusers` draws in torch._dynamo, peft, transformers and scipy.stats: three quarters of its
time, for a few names of each. While a rank imports, it gets stand-ins for these. A name taken from
one does what the real one does, and imports the package only where that takes it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["import_all"]

PUT_OFF = ("torch._dynamo", "peft", "transformers", "torchao", "scipy.stats")

# Functions of diffusers that import a package to look for its objects: there are none before it is
# imported. By module and name, with the package and what they return then.
LOOKING_FOR: dict[str, dict[str, tuple[str, Any]]] = {
    "diffusers.utils.torch_utils": {"is_compiled_module": ("torch._dynamo", False)},
    "diffusers.utils.peft_utils": {
        "scale_lora_layers": ("peft", None),
        "unscale_lora_layers": ("peft", None),
    },
}


def import_all(names: Sequence[str]) -> None:
    """Import the modules of these names; one that fails tells when it is used."""
    needed = {name.partition(".")[0] for name in names}
    for name in names:
        try:
            with _put_off([package for package in PUT_OFF if package not in needed]):
                if name.startswith("diffusers."):
                    _look_only_if_loaded()
                importlib.import_module(name)
        except Exception:
            # Something was done with a stand-in that none of them can do.
            with suppress(Exception):
                importlib.import_module(name)


@contextmanager
def _put_off(packages: Sequence[str]) -> Iterator[None]:
    """Stand-ins for those of the packages that are not imported yet; gone at the end."""
    loaded = tuple(sys.modules)  # whoever took a part of a package gets the rest of it too
    finder = _Finder([p for p in packages if not any(_is_in(name, p) for name in loaded)])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n, module in sys.modules.items() if isinstance(module, _StandIn)]:
            module = sys.modules.pop(name)
            parent, _, child = name.rpartition(".")
            if vars(sys.modules.get(parent, module)).get(child) is module:
                delattr(sys.modules[parent], child)


def _look_only_if_loaded() -> None:
    """Replace the functions, before other modules take them by name."""
    for module_name, functions in LOOKING_FOR.items():
        module = importlib.import_module(module_name)
        for name, (package, otherwise) in functions.items():
            original = getattr(module, name, None)
            if original is None or isinstance(original, _OnlyIfLoaded):
                continue
            replacement = _OnlyIfLoaded(original, package, otherwise)
            for holder in (module, sys.modules["diffusers.utils"]):
                if getattr(holder, name, None) is original:
                    setattr(holder, name, replacement)


class _OnlyIfLoaded:
    """A function that is only called once a package was imported."""

    def __init__(self, function: Callable[..., Any], package: str, otherwise: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._package, self._otherwise = function, package, otherwise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._package not in sys.modules:
            return self._otherwise
        return self._function(*args, **kwargs)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for packages and all of their modules."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = next((p for p in self._packages if _is_in(name, p)), None)
        if package is None or (name == package and PathFinder.find_spec(name, path) is None):
            return None  # not ours, or not installed
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are made when they are asked for."""


class _StandIn(ModuleType):
    """Stands for a module until that is really there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self.__name__ == "torch._dynamo" and name not in _OF_DYNAMO):
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        if sys.modules.get(self.__name__) is not self:  # all that remained of it is this reference
            return getattr(importlib.import_module(self.__name__), name)
        if self.__name__ == "torch._dynamo":
            return _OF_DYNAMO[name]
        if name[0].isupper():
            return _PutOffClass(name, (), {"__module__": self.__name__})
        return functools.partial(_call, self.__name__, name)


def _call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


class _PutOffClass(type):
    """Stands for a class; of one that was never loaded, nothing is an instance."""

    def __new__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> _PutOffClass:
        if bases:
            raise TypeError(f"the stand-in {bases[0].__name__} can have no subclass")
        return super().__new__(cls, name, bases, content)

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls._is_loaded() and isinstance(instance, cls._real())

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return subclass is cls or (cls._is_loaded() and issubclass(subclass, cls._real()))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._real()(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} has no {name}")
        return getattr(cls._real(), name)

    def _is_loaded(cls) -> bool:
        module = sys.modules.get(cls.__module__)
        return module is not None and not isinstance(module, _StandIn)

    def _real(cls) -> Any:
        return getattr(importlib.import_module(cls.__module__), cls.__name__)


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """As `torch._dynamo.disable`; before dynamo is there, nothing compiles anyway."""
    if fn is None:
        return lambda fn: _disable(fn, recursive, **options)
    if isinstance(fn, type):
        raise TypeError("there is no stand-in for torch._dynamo.disable of a class")
    disabled: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = sys.modules["torch._dynamo"].disable(fn, recursive, **options)
        return (disabled or fn)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what dynamo looks for
    return call


def _allow_in_graph(fn: Any) -> Any:
    """As `torch._dynamo.allow_in_graph`, without which a graph only shows more of what it does."""
    return fn


_OF_DYNAMO: dict[str, Any] = {"disable": _disable, "allow_in_graph": _allow_in_graph}
