"""Values that only the driver knows, and that a rank's step cache asks for in every call.

A cache config may hold a function such as `lambda: pipe.current_timestep`. The driver keeps it,
calls it once before each call, and sends the value along; the ranks' config holds a stand-in.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from raymod.errors import ConfigError

__all__ = ["CONTEXT", "DriverValues", "TravelledValue", "arrived"]

# Travels among the contexts of a call, under this name.
CONTEXT = "raymod.values"

_FIELDS = ("current_timestep_callback",)
_numbers = itertools.count()
_here: dict[str, Any] = {}


class TravelledValue:
    """Stands in for a function of the driver; called, it gives what it returned for this call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> Any:
        """The value that came with this call."""
        if self.name not in _here:
            raise ConfigError(
                f"{self.name} was asked for outside of a call: its value travels with each call"
            )
        return _here[self.name]


def arrived(values: Mapping[str, Any]) -> None:
    """On a rank: take over what came with a call."""
    _here.update(values)


class DriverValues:
    """The functions of one stub's cache configs whose values travel."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[[], Any]] = {}

    def take(self, config: Any) -> Any:
        """`config`, or a copy of it in which stand-ins take the place of such functions.

        Raises:
            ConfigError: It is no function.
        """
        for field in _FIELDS:
            function = getattr(config, field, None)
            if function is None or isinstance(function, TravelledValue):
                continue
            if not callable(function):
                raise ConfigError(f"{field} must be a function, not {function!r}")
            name = f"{field} {os.getpid()}.{next(_numbers)}"
            self._functions[name] = function
            config = copy.copy(config)
            setattr(config, field, TravelledValue(name))
        return config

    def contexts(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """What is to travel with a call now, in the form of a context."""
        if not self._functions:
            return ()
        return ((CONTEXT, {name: _plain(get()) for name, get in self._functions.items()}),)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
