"""Run the transformer of a diffusers pipeline split over a gang of Ray actors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymod.api import from_loader, from_pretrained, unwrap, wrap
    from raymod.config import GangConfig, ParallelConfig, PrepareConfig
    from raymod.errors import (
        CallTimeoutError,
        CapacityError,
        ConfigError,
        GangError,
        GangFailedError,
        GangStartError,
        PackError,
        RankDiedError,
        RankError,
        RaymodError,
        SplitError,
        StartTimeoutError,
        StubClosedError,
        UnsupportedError,
        WeightsError,
    )
    from raymod.module import RemoteModule

__version__ = "0.1.0"

__all__ = [
    "CallTimeoutError",
    "CapacityError",
    "ConfigError",
    "GangConfig",
    "GangError",
    "GangFailedError",
    "GangStartError",
    "PackError",
    "ParallelConfig",
    "PrepareConfig",
    "RankDiedError",
    "RankError",
    "RaymodError",
    "RemoteModule",
    "SplitError",
    "StartTimeoutError",
    "StubClosedError",
    "UnsupportedError",
    "WeightsError",
    "from_loader",
    "from_pretrained",
    "unwrap",
    "wrap",
]

_HOMES = {
    "GangConfig": "raymod.config",
    "ParallelConfig": "raymod.config",
    "PrepareConfig": "raymod.config",
    "RemoteModule": "raymod.module",
    "from_loader": "raymod.api",
    "from_pretrained": "raymod.api",
    "unwrap": "raymod.api",
    "wrap": "raymod.api",
}


def __getattr__(name: str) -> Any:
    # torch and Ray are only imported once something that needs them is asked for
    if name not in __all__:
        raise AttributeError(f"module 'raymod' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "raymod.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
