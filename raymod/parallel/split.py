"""One module on several ranks: which way each call is split, checked before it is trusted.

The first call of each kind is also run whole on every rank, and what the split run puts out is
compared with that. All ranks judge together, so that none goes a way of its own; for the same
reason everything that is remembered here must be equal on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raymod.calls.joining import Join, guess_join
from raymod.errors import SplitError
from raymod.parallel.batch import Call, batch_size, candidates
from raymod.parallel.caches import Caches
from raymod.parallel.judge import Judge, Trial
from raymod.parallel.kinds import kind_of, sizes_of
from raymod.parallel.mesh import Mesh
from raymod.parallel.sequence import TooFewTokensError
from raymod.parallel.ways import WHOLE, Mechanism, Runner, Split, Way

__all__ = ["Share", "Splitter"]

# After as many kinds that differ in plain integers alone, integers count no longer: they change
# with every call then, as a step number does.
MANY_VALUES = 8


@dataclass(frozen=True)
class Share:
    """What one rank has after a call.

    Attributes:
        replies: Whether this rank sends its output.
        output: The output, or this batch group's part of it; None where it does not reply.
        join: How the parts of the replying ranks go together, in rank order. None: rank 0 has the
            whole output.
        warnings: What the user should hear, each text once; on rank 0 only.
    """

    replies: bool
    output: Any
    join: Join | None
    warnings: tuple[str, ...] = ()


class Splitter:
    """Runs a module's calls split over the ranks of a mesh; the same calls on every rank."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        mechanisms: Mapping[Split, Mechanism],
        *,
        asked: bool,
        verify: bool,
    ) -> None:
        """Set it up; nothing runs yet.

        Args:
            module: The module, the same on every rank.
            mesh: The ranks.
            mechanisms: What can split it, beside the batch.
            asked: Whether the user asked for these degrees: then a split that is not exact is an
                error, else the next best way is taken.
            verify: Whether the first call of each kind is checked.
        """
        self.module = module
        self.mesh = mesh
        self._name = type(module).__name__
        self._runner = Runner(module, mesh, mechanisms)
        self._caches = Caches(module, mesh, list(mechanisms.values()))
        self._parameters = list(inspect.signature(module.forward).parameters)
        self._splits = tuple(split for split in Split if split in mechanisms)
        self._asked = asked
        self._verify = verify
        self._by_batch = mesh.degrees.batch_degree > 1 or not asked
        self._ways: dict[Hashable, Way] = {}
        self._families: dict[Hashable, list[Way]] = {}
        self._said: set[str] = set()
        self._calls = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Share:
        """Run one call, whose arguments are the same on every rank.

        Raises:
            SplitError: A split that was asked for does not reproduce the module's own output.
        """
        call: Call = (tuple(args), dict(kwargs))
        self._calls += 1
        try:
            with torch.no_grad():
                return self._run(call)
        except BaseException:
            self.reset_caches()  # a step by half must not be built upon
            raise

    def resume(self, calls: int) -> None:
        """Draw random numbers as after that many calls; for ranks in the place of others."""
        self._calls = calls

    def forget(self) -> None:
        """Check the next call of each kind again; for when the module has changed."""
        self._ways.clear()
        self._families.clear()
        self._caches.find()
        for mechanism in self._runner.mechanisms.values():
            mechanism.forget()

    def reset_caches(self) -> None:
        """Forget what step caches hold."""
        self._caches.reset()

    def _run(self, call: Call) -> Share:
        if self.mesh.world_size == 1:
            return self._share(call, WHOLE, None)
        kind = self._kind(call)
        here = (kind, sizes_of(call))
        way = self._ways.get(here) or self._ways.get(kind) or self._usual(call)
        try:
            if way is not None and self._allowed(call, way.groups):
                return self._share(call, way, here)
            return self._first(call, here if way else kind, here, self._splits)
        except TooFewTokensError as error:
            rest = tuple(split for split in self._splits if not split.by_sequence)
            if self._asked and not rest:
                raise
            return self._first(call, here, here, rest, why=str(error))

    def _allowed(self, call: Call, groups: int) -> bool:
        """Whether step caches let the batch be divided into so many groups."""
        return groups == 1 or not self._caches.batch_limit(batch_size(call), groups)

    def _share(self, call: Call, way: Way, here: Hashable) -> Share:
        part = self._runner.part(call, way)
        idle = part is not None and part.own == 0
        self._caches.expect(way, _main_shape(call))
        # apart from the check, which the caches have no part in
        key = (here, self._caches.phase) if self._caches.hooks else here
        output = None if idle else self._runner.run(call, way, seed=self._calls, key=key)
        return self._made(call, way, output)

    def _made(self, call: Call, way: Way, output: Any, texts: tuple[str, ...] = ()) -> Share:
        part = self._runner.part(call, way)
        if part is not None and part.batch < way.groups:
            texts += (f"a batch of {part.batch} over {way.groups} groups leaves some of them idle",)
        warnings = self._news(texts)
        if (part is not None and part.own == 0) or not self._runner.replies(way):
            return Share(False, None, None, warnings)
        join = way.join
        if part is not None and join is None:
            join = guess_join(output, own=part.own)
        return Share(True, output, join, warnings)

    def _news(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        news = tuple(text for text in dict.fromkeys(texts) if text not in self._said)
        self._said.update(news)
        return news if self.mesh.rank == 0 else ()

    # -- which way -----------------------------------------------------------------------------

    def _kind(self, call: Call, *, values: bool = True) -> Hashable:
        return kind_of(call, self._parameters, by_batch=self._by_batch, values=values)

    def _usual(self, call: Call) -> Way | None:
        """The way of a family whose many kinds all went the same one."""
        ways = self._families.get(self._kind(call, values=False), [])
        return ways[0] if len(ways) >= MANY_VALUES and len(set(ways)) == 1 else None

    def _first(
        self,
        call: Call,
        key: Hashable,
        here: Hashable,
        splits: Sequence[Split],
        *,
        why: str = "",
    ) -> Share:
        """The first call of a kind: find its way, keep it under `key`, and give its output."""
        ways = self._wanted(call, splits)
        texts = [f"{self._name} is not split by sequence for a call: {why}"] if why else []
        texts.extend(self._not_divided(call, splits))
        if not ways or not self._verify:
            way = self._guessed(call, ways[0]) if ways else WHOLE
            self._ways[key] = way
            share = self._share(call, way, here)
            return replace(share, warnings=self._news(tuple(texts)) + share.warnings)
        with self._plain():
            trial = self._choose(call, ways, here, texts)
        if trial.is_final:
            self._ways[key] = trial.way
            self._families.setdefault(self._kind(call, values=False), []).append(trial.way)
        if not self._caches.hooks and not self._is_compiled():
            return self._made(call, trial.way, trial.output, tuple(texts))
        share = self._share(call, trial.way, here)
        return replace(share, warnings=self._news(tuple(texts)) + share.warnings)

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """The model itself: step caches notice nothing, and nothing is compiled."""
        with self._caches.off():
            if not self._is_compiled():
                yield
                return
            with torch.compiler.set_stance("force_eager"):
                yield

    def _is_compiled(self) -> bool:
        return any(part._compiled_call_impl is not None for part in self.module.modules())

    def _wanted(self, call: Call, splits: Sequence[Split]) -> list[Way]:
        """The ways to try, best first; after the last one comes the whole model."""
        most = self.mesh.degrees.batch_degree if self._asked else self.mesh.world_size
        divisible = batch_size(call) > 1 and self._allowed(call, most)
        if self._asked:
            groups = most if divisible else 1
            ways = [Way(split, groups) for split in splits]
            return ways or ([Way(Split.NONE, groups)] if groups > 1 else [])
        by_sequence = [Way(split, 1) for split in splits if split.by_sequence]
        others = [Way(split, 1) for split in splits if not split.by_sequence]
        by_batch = [Way(Split.NONE, most)] if divisible else []
        # fewer samples than ranks would leave some of them idle
        rest = by_batch + others if batch_size(call) >= most else others + by_batch
        return by_sequence + rest

    def _choose(self, call: Call, ways: list[Way], here: Hashable, texts: list[str]) -> Trial:
        """The first of `ways` that reproduces the model; says in `texts` what does not."""
        judge = Judge(self._runner, seed=self._calls, key=here)
        whole = judge.whole(call)
        if not whole.says_something:
            texts.append(
                f"{self._name} itself puts out nothing but NaN or infinity, without any split, so "
                f"no split can be checked by it; every rank runs the whole of such calls"
            )
            return Trial(WHOLE, output=whole.output, is_final=False)
        if whole.changed:
            # what a part would make of them differs between ranks, and from what is right
            text = (
                f"a call changes the module's own {', '.join(whole.changed[:3])}, as in training "
                f"mode; call eval() on it before, if that is not meant"
            )
            if self._asked:
                raise SplitError(self._refusal(text))
            texts.append(f"{self._name} is not split, it runs whole on every rank: {text}")
            return Trial(WHOLE, output=whole.output, is_final=False)
        for way in ways:
            trial = judge.attempt(call, way, whole)
            if not trial.failure:
                if way is not ways[0]:
                    texts[-1] += f"; it is split {way} instead"
                return trial
            if self._asked and way is ways[-1]:
                raise SplitError(self._refusal(trial.failure)) from trial.error
            texts.append(
                f"{self._name} is not split {way} for calls like this one: {trial.failure}"
            )
        texts[-1] += f"; {self._name} runs whole on every rank then"
        return Trial(WHOLE, output=whole.output)

    def _guessed(self, call: Call, way: Way) -> Way:
        """A way that is not checked, with the likeliest cut."""
        if way.groups == 1:
            return way
        return replace(way, cut=next(candidates(call, batch_size(call))))

    def _not_divided(self, call: Call, splits: Sequence[Split]) -> Iterator[str]:
        """What is known beforehand not to be split, in words."""
        degrees = self.mesh.degrees
        most = degrees.batch_degree if self._asked else self.mesh.world_size
        limit = self._caches.batch_limit(batch_size(call), most)
        if limit and most > 1 and (self._asked or not splits):
            yield f"{self._name}: {limit}"
            return
        if batch_size(call) > 1 or (not self._asked and splits):
            return
        if degrees.batch_degree > 1 and self._asked:
            rest = "every batch group runs all of it" if splits else "every rank runs all of it"
            yield (
                f"batch_degree={degrees.batch_degree}: a call with a batch of 1 cannot be divided "
                f"by batch; {rest}"
            )
        elif not self._asked:
            yield (
                f"{self._name} is not split: the batch of a call is 1, and it is not split by "
                f"sequence; every rank runs all of it"
            )

    def _refusal(self, failure: str) -> str:
        degrees = self.mesh.degrees
        if degrees.sequence_degree > 1:
            other = f"batch_degree={self.mesh.world_size}"
        else:
            other = "another degree"
        return (
            f"{self._name} split by {degrees} does not reproduce its own output: {failure}. "
            f"Use {other}, or workers={self.mesh.world_size} alone, which takes only a split that "
            f"is exact."
        )


def _main_shape(call: Call) -> Any:
    """The shape of a call's first tensor, which diffusers models name `hidden_states`."""
    main = call[1].get("hidden_states")
    values = (main, *call[0], *call[1].values())
    return next((value.shape for value in values if isinstance(value, torch.Tensor)), None)
