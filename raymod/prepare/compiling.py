"""Compiling a rank's module."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["compile_module", "forget_compiled"]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_module(
    module: nn.Module, options: bool | Mapping[str, Any], *, rank: int | None
) -> str:
    """Have `module` compiled when it is first called: its repeated blocks, or else all of it.

    Args:
        module: The module, changed in place.
        options: Of `torch.compile`; True: none.
        rank: The rank, which gets a folder of its own for what inductor keeps. None: there is one
            rank only, which takes the usual folder.

    Returns:
        What is compiled, in words.
    """
    given = dict(options) if isinstance(options, Mapping) else {}
    if rank is not None:
        _own_folder(rank)
    blocks: Any = getattr(module, "_repeated_blocks", None)
    parts = [p for p in module.modules() if type(p).__name__ in (blocks or ())]
    for part in parts or [module]:
        part.compile(**given)
    what = f"{len(parts)} blocks compiled" if parts else "compiled as one"
    return f"{what} by {given.get('backend', 'inductor')} in the first call of each kind"


def forget_compiled(module: nn.Module) -> None:
    """After a change of `module`: nothing that was compiled for what it was before counts.

    Otherwise the compiler would give up after a few changes, and run the rest uncompiled.
    """
    if any(part._compiled_call_impl is not None for part in module.modules()):
        torch.compiler.reset()


def _own_folder(rank: int) -> None:
    """Ranks that share inductor's folder have been seen to spoil one another's entries."""
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    base = Path(os.environ.get(_VARIABLE) or usual)
    name = f"raymod-rank-{rank}"
    if base.name != name:
        os.environ[_VARIABLE] = str(base / name)
