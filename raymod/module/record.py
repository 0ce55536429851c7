"""The record of what changed a gang's module since it was loaded, to give a new gang the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from raymod.calls import Packed, pack, unpack
from raymod.module import on_ranks

__all__ = ["Entry", "Record"]


class _Ranks(Protocol):
    def call_all(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Entry:
    """One change that all ranks have made.

    Attributes:
        method: Name of a method of the module, or a function that gets the module first.
        group: What it is about: "adapters", "cache", ...; names of attributes are groups too.
        packed: Its arguments, `(args, kwargs)`.
        local: Whether the driver's module has made it too.
        supersedes: Whether earlier ones of its group no longer mattered.
        random: The state of the generator that it drew from, uint8[n].
    """

    method: str | Callable[..., Any]
    group: str
    packed: Packed
    local: bool
    supersedes: bool
    random: torch.Tensor | None = None


class Record:
    """The changes that all ranks have made, in order.

    A gang that was lost gets its weights again from where they came from. If that is the driver's
    own module (`from_local`), it has all changes already that were made on both sides, so only
    those of the ranks alone are kept. Else (a checkpoint, a loader function) all are.

    Attributes:
        from_local: Whether a new gang would load the driver's module as it stands then.
    """

    def __init__(self, *, from_local: bool) -> None:
        self.from_local = from_local
        self._entries: list[Entry] = []
        self._lock = threading.Lock()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What `replay` would do."""
        return tuple(self._entries)

    def add(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        group: str = "",
        local: bool = True,
        supersedes: bool = False,
        random: torch.Tensor | None = None,
    ) -> None:
        """Enter a change that all ranks have made.

        Args:
            method: As in `Entry`.
            args: Its arguments. The tensors are copied: what was given may change later.
            kwargs: Likewise.
            group: As in `Entry`.
            local: As in `Entry`.
            supersedes: Whether the earlier changes of its group no longer matter. It is entered
                nevertheless, and is harmless on a module that never saw them.
            random: As in `Entry`.
        """
        if local and self.from_local:
            return
        packed = pack((tuple(args), dict(kwargs)))
        packed = Packed(packed.skeleton, tuple(tensor.clone() for tensor in packed.tensors))
        with self._lock:
            if supersedes:
                self._drop(group)
            self._entries.append(Entry(method, group, packed, local, supersedes, random))

    def forget_adapters(self) -> None:
        """Forget adapters that are gone, if they have left no trace: they hold many bytes.

        They have left one if they were fused, or if weights were changed meanwhile, whose names
        are others while there are adapters.
        """
        with self._lock:
            entries = self._entries
            first = next((n for n, e in enumerate(entries) if e.group == "adapters"), len(entries))
            since = entries[first:]
            if not any(_leaves_a_trace(entry) for entry in since):
                kept = [entry for entry in since if entry.group != "adapters"]
                self._entries = entries[:first] + kept

    def replay(self, gang: _Ranks) -> None:
        """Make all changes on a gang that has just loaded the module.

        Raises:
            GangError: A rank could not make one of them.
        """
        for entry in self.entries:
            args, kwargs = unpack(entry.packed)
            gang.call_all(on_ranks.make, entry.method, args, kwargs, random=entry.random)

    def _drop(self, group: str) -> None:
        self._entries = [entry for entry in self._entries if entry.group != group]


def _leaves_a_trace(entry: Entry) -> bool:
    if entry.group == "adapters":
        return entry.method in ("fuse_lora", "unfuse_lora")
    return not entry.supersedes
