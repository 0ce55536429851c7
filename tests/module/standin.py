"""Ranks in this process: a private copy of the module, called as a gang would call it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Report:
    split: str = "2 ranks: ulysses_degree=2"


class Ranks:
    """One rank; `module` is its own copy."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.closes = 0
        self.forgotten = 0

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((args, kwargs))
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def call_all(self, method: Any, *args: Any, reply_rank: int | None = None, **kw: Any) -> Any:
        return [method(self, *args, **kw)]

    def forget_checks(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self.closes += 1
