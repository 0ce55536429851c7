"""What a stub asks of its ranks beside the forward; `worker.module` is a rank's module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raymod.errors import RankFailure, WeightsError
from raymod.module.undo import Snapshot, overwritten

__all__ = [
    "FETCH_BYTES",
    "Outcome",
    "attempt",
    "call",
    "fetch_weights",
    "has_cache",
    "make",
    "nothing",
    "run",
    "settle",
]

FETCH_BYTES = 256 * 2**20


def fetch_weights(gang: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers of rank 0 by name, in pieces of about `FETCH_BYTES`."""
    (sizes,) = gang.call_all(_sizes_on_rank, reply_rank=0)
    values: dict[str, torch.Tensor] = {}
    for names in _batches(sizes):
        (part,) = gang.call_all(_values_on_rank, names, reply_rank=0)
        values.update(part)
    return values


def _batches(sizes: Mapping[str, int]) -> Iterable[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > FETCH_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


@dataclass(frozen=True)
class Outcome:
    """What came of a change on one rank.

    Attributes:
        failure: What it raised; None if it was made.
        whole: Whether the module is as it should be: changed, or after a failure as before.
        value: What the change returned, where that was asked for.
    """

    failure: RankFailure | None = None
    whole: bool = True
    value: Any = None


def attempt(
    worker: Any,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    returns: bool = False,
    random: torch.Tensor | None = None,
) -> Outcome:
    """Change the rank's module, so that it can be taken back until `settle`.

    Never raises for what the change raises: the other ranks may have made it, and the driver is to
    take it back there.

    Args:
        worker: The rank.
        method: Name of a method of the module, or a function that gets the module first.
        args: Its arguments.
        kwargs: Its arguments.
        returns: Whether to send back what it returns.
        random: The state of the driver's generator that new weights are drawn from, uint8[n]: they
            must be the same everywhere.
    """
    worker.undo = None
    try:
        with worker.unsplit() as module:
            worker.undo = Snapshot(module, overwritten(module, method, args, kwargs))
            with _drawing_from(random):
                value = call(module, method, args, kwargs)
    except Exception as error:
        failure = RankFailure.of(error, rank=worker.rank, node=worker.node)
        return Outcome(failure=failure, whole=settle(worker, keep=False))
    return Outcome(value=value if returns else None)


def nothing(worker: Any) -> None:
    """Only whether a rank is there."""


def has_cache(worker: Any) -> bool:
    """Whether a step cache is on."""
    return bool(getattr(worker.module, "is_cache_enabled", False))


def settle(worker: Any, keep: bool) -> bool:
    """Keep what `attempt` did, or take it back.

    Returns:
        Whether the module is as it should be then.
    """
    snapshot, worker.undo = worker.undo, None
    if snapshot is None or keep:
        return True
    try:
        with worker.unsplit():
            snapshot.restore()
    except Exception:
        return False
    return True


def make(
    worker: Any,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    random: torch.Tensor | None = None,
) -> None:
    """Change the rank's module for good; for a gang that is not in use yet."""
    with worker.unsplit() as module, _drawing_from(random):
        call(module, method, args, kwargs)


@contextmanager
def _drawing_from(random: torch.Tensor | None) -> Iterator[None]:
    if random is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(bytes(random[:7].tolist()), "little"))  # of all devices
        torch.set_rng_state(random)
        yield


def run(worker: Any, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of the rank's module that changes nothing which would have to be kept."""
    return getattr(worker.module, method)(*args, **kwargs)


def call(
    module: nn.Module,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Make a change, here or on a rank."""
    if callable(method):
        return method(module, *args, **kwargs)
    return getattr(module, method)(*args, **kwargs)


def _sizes_on_rank(worker: Any) -> dict[str, int]:
    for name, tensor in _tensors(worker.module):
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise WeightsError(
                f"the ranks hold quantized weights ({name} is one: {type(tensor).__name__}), and "
                f"not those that they were made from: load these from their source once more."
            )
    return {name: tensor.nbytes for name, tensor in _tensors(worker.module)}


def _values_on_rank(worker: Any, names: list[str]) -> dict[str, torch.Tensor]:
    wanted = set(names)
    return {
        name: tensor.detach().cpu() for name, tensor in _tensors(worker.module) if name in wanted
    }


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
