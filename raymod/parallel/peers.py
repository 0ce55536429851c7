"""What the ranks of one split tell one another: over a process group, or simulated by threads.

Simulated ranks are for trying a plan out: all in one process, without collectives, so that a plan
that makes a rank wait for the others in vain ends with an error and leaves nothing behind.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from raymod.errors import SplitError
from raymod.parallel.exchange import gather, gather_numbers

__all__ = ["GroupPeers", "Peers", "ThreadPeers", "simulate"]

MAX_SCHEDULES = 64
MAX_DIMS = 8
MAX_WAIT_S = 60.0

_T = TypeVar("_T")

# What each rank said, by the parts that have run before and the place in the order since.
_Schedule = dict[tuple[int, int], list[tuple[int, ...]]]


class Peers(Protocol):
    """One rank's view of the ranks that share one split; each makes the same calls in order.

    Attributes:
        rank: This rank's place among them.
        degree: Number of ranks.
    """

    rank: int
    degree: int

    def numbers(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """The integers of each rank, as many on each, in rank order."""

    def gather(
        self, tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The parts of all ranks, one after the other along `dim`.

        Args:
            tensor: This rank's part; no other dim may differ between ranks.
            dim: The dim along which the parts may differ in size.
            sizes: Size of each rank's part along it. None: it is asked for.

        Raises:
            SplitError: The parts differ in more than `dim`.
        """


class GroupPeers:
    """The ranks of a process group.

    Calls of equal shapes ask for the same numbers in the same order, so these are exchanged in
    the first call only.

    Attributes:
        group: The ranks.
        device: Where this rank computes.
        rank: This rank's place in the group.
        degree: Number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.degree = dist.get_world_size(group)
        self._schedules: OrderedDict[Hashable, _Schedule] = OrderedDict()
        self._schedule: _Schedule = {}
        self._path = 0
        self._step = 0

    @contextmanager
    def on(self, key: Hashable) -> Iterator[None]:
        """Remember what is exchanged inside.

        Args:
            key: Equal for calls of equal shapes, and the same on all ranks of the group.
        """
        self._schedule = self._schedules.pop(key, {})
        self._path = self._step = 0
        yield
        self._schedules[key] = self._schedule
        while len(self._schedules) > MAX_SCHEDULES:
            self._schedules.popitem(last=False)

    def numbers(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """What `mine` is on each rank of the group.

        They are looked up by their place in the order. (Going by `mine` would not do: one rank may
        have seen it before and another not, and then only the other one would wait.)

        Raises:
            SplitError: They are not what they were in the first call.
        """
        step = self._step
        self._step += 1
        row = self._schedule.get((self._path, step))
        if row is not None:
            if row[self.rank] != tuple(mine):
                raise SplitError(
                    f"exchange number {step} of this call has sizes {tuple(mine)} and had "
                    f"{row[self.rank]} in an earlier call with equal shapes: the number of tokens "
                    f"depends on values. Use batch_degree instead of ulysses_degree."
                )
            return row
        row = gather_numbers(mine, self.group, self.device)
        self._schedule[self._path, step] = row
        return row

    def shapes(self, tensor: torch.Tensor) -> list[tuple[int, ...]]:
        """The shape of a tensor on each rank."""
        padded = [tensor.ndim, *tensor.shape, *[-1] * (MAX_DIMS - tensor.ndim)]
        return [row[1 : 1 + row[0]] for row in self.numbers(padded)]

    def gather(
        self, tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """As `Peers.gather`."""
        if sizes is None:
            sizes = _sizes(self.shapes(tensor), dim)
        return gather(tensor, dim, sizes, self.group)

    def forget(self) -> None:
        """Exchange the numbers anew; for when the module has changed, on all ranks."""
        self._schedules.clear()

    def note(self, part: int) -> None:
        """A part of the module runs that step caches may skip; the same on all ranks.

        What is exchanged then is looked up by the parts that have run so far in this call.
        """
        self._path = hash((self._path, part))
        self._step = 0


class ThreadPeers:
    """Simulated ranks, each a thread of this process; made by `simulate`.

    Attributes:
        rank: This rank's place.
        degree: Number of ranks.
    """

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.degree = len(board)
        self._board = board
        self._barrier = barrier

    def numbers(self, mine: Sequence[int]) -> list[tuple[int, ...]]:
        """As `Peers.numbers`."""
        return self._exchanged("numbers", tuple(mine))

    def gather(
        self, tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """As `Peers.gather`."""
        parts = self._exchanged("gather", tensor)
        there = _sizes([tuple(part.shape) for part in parts], dim)
        if sizes is not None and list(sizes) != there:
            raise SplitError(f"the ranks' parts have sizes {there}, not {list(sizes)}")
        return torch.cat(parts, dim)

    def finish(self) -> None:
        """This rank is done; an error at once, instead of a wait, where another is not."""
        self._exchanged("finish", None)

    def _exchanged(self, what: str, mine: Any) -> list[Any]:
        self._board[self.rank] = what, mine
        self._barrier.wait()
        every = list(self._board)
        self._barrier.wait()  # nobody writes before all have read
        if {name for name, _ in every} != {what}:
            raise SplitError("the ranks do not make the same exchanges")
        return [value for _, value in every]


def simulate(
    degree: int, run: Callable[[ThreadPeers], _T], *, limit_s: float = MAX_WAIT_S
) -> list[_T]:
    """Run something on simulated ranks at once.

    Args:
        degree: Number of ranks.
        run: Called once a rank, with that rank's view of the others.
        limit_s: How long a rank waits for the others in one exchange, in seconds.

    Returns:
        What `run` returned on each rank, in rank order.

    Raises:
        SplitError: The ranks did not make the same exchanges, or one waited in vain.
        Exception: What `run` raised on the first rank that failed by itself.
    """
    barrier = threading.Barrier(degree, timeout=limit_s)
    board: list[Any] = [None] * degree
    results: list[Any] = [None] * degree
    errors: list[BaseException] = []
    with_grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def work(rank: int) -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(with_grad):
                peers = ThreadPeers(rank, board, barrier)
                results[rank] = run(peers)
                peers.finish()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"raymod-simulated-{rank}", daemon=True)
        for rank in range(degree)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if own:
        raise own[0]
    if errors:
        raise SplitError(f"a rank waited {limit_s:g} s for the others in vain") from errors[0]
    return results


def _sizes(shapes: Sequence[tuple[int, ...]], dim: int) -> list[int]:
    """Sizes along `dim` of parts that agree in all else."""
    ndim = len(shapes[0])
    if not -ndim <= dim < ndim:
        raise SplitError(f"no gather along dim {dim} of a tensor of shape {list(shapes[0])}")
    dim %= ndim
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        raise SplitError(f"a gather along dim {dim} of {list(shapes)}, which differ in more")
    return [shape[dim] for shape in shapes]
