"""Where the code of a module comes from, and what of it another process could not import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

import cloudpickle
from torch import nn

__all__ = ["imports_of", "sent_along"]


def imports_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the modules that a rank imports for the parts of `module`."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    return tuple(
        name
        for name in _names(module)
        if name != "__main__"
        and not any(name == other or name.startswith(f"{other}.") for other in by_value)
    )


@contextmanager
def sent_along(module: nn.Module) -> Iterator[None]:
    """While in it, the code of what nobody could import a second time is pickled, not its name.

    Such is a module that was made at run time, or loaded from a folder that is no longer on the
    path.
    """
    names = [name for name in imports_of(module) if not _can_be_found(name)]
    found = [sys.modules[name] for name in names if isinstance(sys.modules.get(name), ModuleType)]
    for one in found:
        cloudpickle.register_pickle_by_value(one)
    try:
        yield
    finally:
        for one in found:
            cloudpickle.unregister_pickle_by_value(one)


def _names(module: nn.Module) -> list[str]:
    return list(dict.fromkeys(type(part).__module__ for part in module.modules()))


def _can_be_found(name: str) -> bool:
    """Whether an import of `name` would find something, had it not been imported yet."""
    parent, _, _ = name.rpartition(".")
    if parent and not _can_be_found(parent):
        return False
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    for finder in sys.meta_path:
        with suppress(Exception):  # a finder of somebody else's
            if finder.find_spec(name, path) is not None:
                return True
    return False
