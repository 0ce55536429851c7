"""Which of the driver's environment variables the ranks get."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from raymod.config import GangConfig

__all__ = ["forwarded", "import_paths", "runtime_env"]

logger = logging.getLogger(__name__)

# Settings of the libraries that run on a rank. docs/clusters.md lists them.
PREFIXES = (
    "CUDA_",
    "DIFFUSERS_",
    "GLOO_",
    "HF_",
    "HUGGING",
    "NCCL_",
    "PYTORCH_",
    "RAYMOD_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRANSFORMERS_",
)

# What tells one process or one machine from another, although a prefix matches.
NOT_THESE = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_BIN_PATH", "CUDA_INC_PATH")
NOT_SUFFIXES = ("_VISIBLE_DEVICES", "_HOST_IP")

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def forwarded(config: GangConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The driver's variables that each rank adopts; names are logged, values never.

    Args:
        config: Whether to forward at all.
        environ: The driver's environment.
    """
    if not config.forward_env:
        return {}
    chosen = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIXES)
        and name not in NOT_THESE
        and not name.endswith(NOT_SUFFIXES)
        and name not in config.env_vars
    }
    if chosen:
        logger.debug("environment variables for the ranks: %s", ", ".join(sorted(chosen)))
    return chosen


def runtime_env(config: GangConfig) -> dict[str, Any]:
    """Ray's runtime environment of each rank: the user's, with `env_vars` on top.

    It is the actor's own, so it works whether or not Ray was running before.
    """
    merged = dict(config.runtime_env or {})
    variables = dict(merged.get("env_vars") or {}) | dict(config.env_vars)
    if config.all_gpus_visible:
        variables[NOSET] = "1"
    if variables:
        merged["env_vars"] = variables
    return merged


def import_paths() -> tuple[str, ...]:
    """Where this process finds modules of the user's, for ranks that have the same folders.

    What an interpreter has by itself is left out: a rank may run in another environment.
    """
    own = [os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
    paths = dict.fromkeys(os.path.abspath(path) for path in sys.path)
    return tuple(path for path in paths if os.path.exists(path) and not _is_within(path, own))


def _is_within(path: str, folders: list[str]) -> bool:
    real = os.path.realpath(path)
    installed = ("site-packages", "dist-packages", "lib-dynload")
    return os.path.basename(real) in installed or any(
        real.startswith(os.path.join(folder, "lib")) for folder in folders
    )
