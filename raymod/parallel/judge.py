"""Whether a split reproduces the model: tried on a real call, judged by all ranks together."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raymod.calls.joining import Join, find_join, take
from raymod.calls.trees import map_tensors
from raymod.errors import SplitError
from raymod.parallel.batch import Call, batch_sizes, candidates
from raymod.parallel.sequence import TooFewTokensError
from raymod.parallel.verify import difference, equal_bytes, is_all_broken, limit_for
from raymod.parallel.ways import WHOLE, Runner, Split, Way

__all__ = ["Judge", "Trial", "Whole"]

# How long a rank waits for the others' verdict: they have run the same, but may be slower.
MIN_PATIENCE_S = 60.0
PATIENCE_IN_RUNS = 10
# The same of a rank that raised: if it did so alone, they are likely to wait for it in a
# collective, and will never come.
MIN_PATIENCE_AFTER_ERROR_S = 5.0
PATIENCE_AFTER_ERROR_IN_RUNS = 4

# When the search for what carries the batch ends: most wrong guesses fail at once.
MAX_BATCH_SIZES = 2
MAX_SEARCH_IN_RUNS = 4
MIN_SEARCH_S = 1.0


@dataclass(frozen=True)
class Whole:
    """The module's own output for a call.

    Attributes:
        output: The output, of all samples and tokens.
        limit: The largest difference that counts as equal.
        seconds: How long it took the slowest rank.
        says_something: Whether there is anything in it to compare with; the same on all ranks.
        changed: Names of the module's buffers that the run has changed; the same on all ranks.
    """

    output: Any
    limit: float
    seconds: float
    says_something: bool = True
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """What came of trying a way; but for `output` and `error` the same on all ranks.

    Attributes:
        way: The way that was tried, with what was found out.
        failure: Why it cannot be taken, in words; empty where it can.
        seconds: How long it took the slowest rank.
        output: This rank's output.
        error: What this rank raised.
        is_final: Whether later calls of the kind may go the same way.
    """

    way: Way
    failure: str = ""
    seconds: float = 0.0
    output: Any = None
    error: Exception | None = None
    is_final: bool = True


class Judge:
    """Tries ways to run one call."""

    def __init__(self, runner: Runner, *, seed: int, key: Hashable) -> None:
        """As `Runner.run`."""
        self._runner = runner
        self._mesh = runner.mesh
        self._seed = seed
        self._key = key

    def whole(self, call: Call) -> Whole:
        """Run the module as it is.

        Raises:
            SplitError: There is not enough memory for that.
        """
        start = time.monotonic()
        before = _versions(self._runner.module)
        try:
            output = self._run(call, WHOLE)
        except torch.OutOfMemoryError as error:
            raise SplitError(
                f"the first call of a kind also runs whole on every rank, to compare the split "
                f"with, and that ran out of memory: {error}. Make the first call a smaller one, or "
                f"set ParallelConfig(verify=False) if you have compared the outputs yourself."
            ) from error
        mine = time.monotonic() - start
        nothing = float(is_all_broken(output))
        seconds, nothing = self._mesh.worst([mine, nothing], limit_s=_patience_s(mine))
        changed = _changed(self._runner.module, before)
        limit = limit_for(self._runner.module, output)
        return Whole(output, limit, seconds, not nothing, changed)

    def attempt(self, call: Call, way: Way, whole: Whole) -> Trial:
        """Run the call in a way and compare; all ranks must do so together.

        Raises:
            TooFewTokensError: There are fewer tokens than ranks; on all ranks then.
            TimeoutError: The other ranks did not finish.
        """
        if way.groups == 1:
            return self._compare(call, way, whole)
        # The batch first, with no collective inside: a wrong cut cannot leave a rank waiting.
        trial = self._find_cut(call, replace(way, split=Split.NONE), whole)
        if trial.failure or way.split is Split.NONE:
            return trial
        return self._compare(call, replace(trial.way, split=way.split), whole)

    def _find_cut(self, call: Call, way: Way, whole: Whole) -> Trial:
        first: Trial | None = None
        left = max(MIN_SEARCH_S, MAX_SEARCH_IN_RUNS * whole.seconds)
        sizes = [size for size in batch_sizes(call) if size > 1][:MAX_BATCH_SIZES]
        for cut in (cut for size in sizes for cut in candidates(call, size)):
            trial = self._compare(call, replace(way, cut=cut), whole)
            if not trial.failure:
                return trial
            first = first or trial
            left -= trial.seconds
            if left <= 0:
                break
        return first or Trial(way, failure="nothing in the call looks like a batch")

    def _compare(self, call: Call, way: Way, whole: Whole) -> Trial:
        part = self._runner.part(call, way)
        output: Any = None
        error: Exception | None = None
        join: Join | None = None
        value, where = 0.0, ""
        start = time.monotonic()
        if part is None or part.own:
            try:
                output = self._run(call, way)
                due = whole.output
                if part is not None:
                    join = find_join(due, output, batch=part.batch, own=part.own)
                    if join is not None:
                        span = {"start": part.start, "stop": part.stop, "batch": part.batch}
                        due = take(due, join, **span)
                found = difference(due, output)
                value, where = found.value, found.where
                if math.isfinite(value):
                    where += f", where {whole.limit:.0e} is allowed"
            except Exception as raised:  # a wrong cut can make any of it fail
                error = raised
                value, where = math.inf, f"it raised {type(raised).__name__}: {raised}"
        worst, seconds = self._agree(value, time.monotonic() - start, error, whole)
        if worst > whole.limit:
            said = self._said(where if value > whole.limit else "", whole)
            text = next(text for text in said if text)
            return Trial(way, text, seconds, error=error)
        return Trial(replace(way, join=self._said(join, whole)[0]), "", seconds, output)

    def _run(self, call: Call, way: Way) -> Any:
        return self._runner.run(_fresh(call), way, seed=self._seed, key=self._key)

    def _said(self, mine: Any, whole: Whole) -> list[Any]:
        return self._mesh.said(mine, limit_s=_patience_s(whole.seconds))

    def _agree(
        self, value: float, seconds: float, error: Exception | None, whole: Whole
    ) -> tuple[float, float]:
        """The largest difference and the longest time on any rank."""
        too_few = error if isinstance(error, TooFewTokensError) else None
        limit_s = _patience_s(whole.seconds, raised=error is not None)
        found: list[float] | None = None
        try:
            found = self._mesh.worst([value, seconds, float(too_few is not None)], limit_s=limit_s)
        except TimeoutError:
            if error is None:
                raise
        if found is None:
            assert error is not None
            raise error  # out here, so that it keeps its own context
        worst, slowest, any_too_few = found
        if any_too_few:
            raise too_few or TooFewTokensError("another rank has fewer tokens than ranks")
        return worst, slowest


def _patience_s(seconds: float, *, raised: bool = False) -> float:
    if raised:
        return max(MIN_PATIENCE_AFTER_ERROR_S, PATIENCE_AFTER_ERROR_IN_RUNS * seconds)
    return max(MIN_PATIENCE_S, PATIENCE_IN_RUNS * seconds)


def _fresh(call: Call) -> Call:
    """A copy of the call: a forward may change what it is given, and more than one will run."""
    try:
        return copy.deepcopy(call)
    except Exception:  # something in it cannot be copied and is shared
        copied: Call = map_tensors(call, torch.Tensor.clone)
        return copied


def _versions(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """The module's buffers, each with a count that grows when it is written to."""
    return {name: (buffer, _version(buffer)) for name, buffer in module.named_buffers()}


def _version(buffer: torch.Tensor) -> int:
    try:
        return buffer._version
    except RuntimeError:  # one that was made in inference mode does not count
        return 0


def _changed(module: nn.Module, before: dict[str, tuple[torch.Tensor, int]]) -> tuple[str, ...]:
    """Names of the buffers that are not what they were; new ones are no change, but a cache."""
    names = []
    for name, (now, version) in _versions(module).items():
        was, had = before.get(name, (now, version))
        if version != had if now is was else not _is_equal(now, was):
            names.append(name)
    return tuple(names)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and equal_bytes(one, other)
