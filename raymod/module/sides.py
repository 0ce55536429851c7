"""The two sides of a stub, changed together: the driver's own module, and the ranks' copies."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import nn

from raymod.calls.modes import MODES, modes
from raymod.calls.values import DriverValues
from raymod.errors import (
    GangError,
    GangFailedError,
    RankDiedError,
    RankError,
    RaymodError,
    WeightsError,
)
from raymod.module import on_ranks
from raymod.module.record import Record
from raymod.module.undo import Snapshot, overwritten
from raymod.module.watch import Watch, config_of, make_differences, set_config

__all__ = ["Contexts", "LocalWeights", "Method", "RanksProtocol", "Sides"]

Contexts = tuple[tuple[str, Mapping[str, Any]], ...]
Method = str | Callable[..., Any]


class RanksProtocol(Protocol):
    """All that a stub knows of its gang.

    Attributes:
        on_rebuilt: Called with the gang when its ranks were started anew and have loaded the
            module.
    """

    on_rebuilt: Callable[[Any], None] | None

    @property
    def report(self) -> Any:
        """How they were started, the last time."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], contexts: Contexts = ()) -> Any:
        """One forward on the ranks; the output's tensors are on the CPU."""

    @property
    def last_call(self) -> Any:
        """Where the time and the bytes of the last call went; None before it."""

    def call_all(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """One method, or function of the worker, on every rank; the replies in rank order."""

    def health(self, timeout_s: float = 5.0) -> tuple[Any, ...]:
        """How each rank is, also during a call."""

    def restart(self) -> None:
        """Start the ranks anew, with all that has changed."""

    def fail(self, error: GangError) -> None:
        """End the ranks because of `error`."""

    def close(self) -> None:
        """End the ranks; harmless when repeated."""


class LocalWeights(Protocol):
    """Local weights that were freed and can be put back."""

    def restore(self, values: Mapping[str, torch.Tensor]) -> None:
        """Put `values`, by name, back into the very parameters and buffers from before."""

    def follow(self, module: nn.Module) -> None:
        """Free what `module` has got since, and note the names that its weights have now."""


class Sides:
    """The driver's module and its ranks.

    Attributes:
        original: The driver's module.
        gang: Its ranks.
        record: What has changed since the ranks loaded it.
        freed: The driver's weights, where they were freed.
        values: What only the driver knows, and sends with each call.
    """

    def __init__(
        self,
        original: nn.Module,
        gang: RanksProtocol,
        record: Record,
        freed: LocalWeights | None = None,
        values: DriverValues | None = None,
    ) -> None:
        self.original = original
        self.gang = gang
        self.record = record
        self.freed = freed
        self.values = values or DriverValues()
        self._watch: Watch | None = None
        self._config = config_of(original)
        self._began_adapted = _is_adapted(original)
        self._turn = threading.RLock()
        self._unsettled = False
        gang.on_rebuilt = self._rebuilt

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], contexts: Contexts) -> Any:
        """One call of the ranks' module; waits for a change that another thread makes."""
        with self._in_turn():
            self._follow()
            here = modes()
            in_modes = ((MODES, here),) if here else ()
            return self.gang.call(args, kwargs, (*in_modes, *self.values.contexts(), *contexts))

    def restart(self) -> None:
        """Start the ranks anew; waits for a call or a change that another thread makes."""
        with self._turn:
            self.gang.restart()

    def fetch(self) -> dict[str, torch.Tensor]:
        """All weights of rank 0, by name."""
        with self._in_turn():
            self._follow()
            self._find_dead()
            return on_ranks.fetch_weights(self.gang)

    def restore(self, *, closed: bool) -> None:
        """Put the local weights back where they were freed.

        Args:
            closed: Whether the stub was closed.

        Raises:
            WeightsError: The ranks that held them are gone.
        """
        if self.freed is None:
            return
        lost = (
            "the local weights were freed with keep_local=False and the ranks that held them are "
            "gone; load the module again"
        )
        if closed:
            raise WeightsError(f"{lost}. Next time raymod.unwrap before closing.")
        try:
            values = self.fetch()
        except WeightsError:  # the ranks have others, and say so
            raise
        except RaymodError as error:
            raise WeightsError(f"{lost}.") from error
        self.freed.restore(values)
        self.freed = None

    def expose(self) -> None:
        """A part of the driver's module is given out, and may be changed from now on."""
        if self._watch is None:
            with self._turn:
                self._watch = self._watch or Watch(self.original)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the ranks' module that changes nothing that has to be kept."""
        with self._in_turn():
            self._find_dead()
            (value,) = self.gang.call_all(on_ranks.run, method, args, kwargs, reply_rank=0)
        return value

    def change(
        self,
        method: Method,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        group: str = "",
        local: bool = True,
        supersedes: bool = False,
    ) -> Any:
        """Make one change on the driver's module and on all ranks, or on none of them.

        Args:
            method: Name of a method of the module, or a picklable function that gets the module as
                its first argument and changes it.
            args: Its arguments.
            kwargs: Its arguments.
            group: What it is about, for the record.
            local: Whether to make it on the driver's module too.
            supersedes: Whether earlier changes of the group no longer matter.

        Returns:
            What it returned on the driver's module; else on rank 0.

        Raises:
            RankError: A rank could not make it; no side has it then.
            GangError: The ranks are gone, or one could not go back to what it was.
        """
        kwargs = kwargs or {}
        with self._in_turn():
            self._follow()
            self._find_dead()
            state = torch.get_rng_state()
            with self._taken_back_on_error(method, args, kwargs, local):
                value = self._locally(method, args, kwargs) if local else None
                # What is drawn here is drawn on the ranks again. Freed weights draw nothing here.
                is_known = local and self.freed is None
                drew_none = is_known and torch.equal(state, torch.get_rng_state())
                random = None if drew_none else state
                outcomes = self._on_ranks(method, args, kwargs, returns=not local, random=random)
            self.record.add(
                method,
                args,
                kwargs,
                group=group,
                local=local,
                supersedes=supersedes,
                random=random,
            )
            if group == "adapters" and not (self._began_adapted or _is_adapted(self.original)):
                self.record.forget_adapters()
            self._note()
        return value if local else outcomes[0].value

    # -- within --------------------------------------------------------------------------------

    def _rebuilt(self, gang: RanksProtocol) -> None:
        """The ranks were started anew: give them what has changed since they first were."""
        self._unsettled = False  # what was changed by half is gone
        self.record.replay(gang)
        if all(gang.call_all(on_ranks.has_cache)):
            warnings.warn(
                "the ranks were started anew while a step cache was on. What it had kept of the "
                "steps before is lost, so a picture that is being made may differ a little from "
                "one that was not disturbed; the next one will not.",
                stacklevel=2,
            )

    def _find_dead(self) -> None:
        """Notice ranks that have died meanwhile, so that a change begins with ranks that live."""
        with suppress(RankDiedError):  # the next request is one to new ranks, or says why not
            self.gang.call_all(on_ranks.nothing)

    def _follow(self) -> None:
        """Make on the ranks what was done to the driver's parts, past the stub."""
        config = config_of(self.original)
        if config != self._config:
            news = {
                k: v for k, v in config.items() if k not in self._config or v != self._config[k]
            }
            self._tell(set_config, news)
        found = [] if self._watch is None else self._watch.differences()
        if found:
            self._tell(make_differences, found)

    def _tell(self, method: Method, what: Any) -> None:
        """Make on the ranks what the driver's module has had done to it already."""
        self._find_dead()
        self._on_ranks(method, (what,), {}, returns=False)
        self.record.add(method, (what,), {}, group="parts")
        if self.freed is not None:
            self.freed.follow(self.original)
        self._note()

    def _note(self) -> None:
        """Take the driver's module as it stands for what the ranks have."""
        self._config = config_of(self.original)
        if self._watch is not None:
            self._watch.note()

    def _locally(self, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a change on the driver's module."""
        # some methods take things out of the dicts that they are given
        args = tuple(dict(value) if type(value) is dict else value for value in args)
        if self.freed is None:
            return on_ranks.call(self.original, method, args, kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            value = on_ranks.call(self.original, method, args, kwargs)
        self.freed.follow(self.original)
        return value

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with self._turn:
            if self._unsettled:  # a change was interrupted: some ranks may have made it
                self._settle(keep=False)
            yield

    @contextmanager
    def _taken_back_on_error(
        self, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any], local: bool
    ) -> Iterator[None]:
        if not local:
            yield
            return
        module = self.original
        before = Snapshot(module, overwritten(module, method, args, kwargs))
        try:
            yield
        except BaseException:
            before.restore()
            raise

    def _on_ranks(
        self,
        method: Method,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        returns: bool,
        random: torch.Tensor | None = None,
    ) -> list[on_ranks.Outcome]:
        self._unsettled = True
        outcomes: list[on_ranks.Outcome] = self.gang.call_all(
            on_ranks.attempt, method, args, kwargs, returns=returns, random=random
        )
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if not failures:
            self._settle(keep=True)
            return outcomes
        error = RankError.from_failures(failures)
        whole = all(outcome.whole for outcome in outcomes)
        self._settle(keep=False, whole=whole, because=error)
        raise error

    def _settle(self, *, keep: bool, whole: bool = True, because: GangError | None = None) -> None:
        """Let all ranks keep the last change, or take it back."""
        whole = whole and all(self.gang.call_all(on_ranks.settle, keep))
        self._unsettled = False
        if not whole:
            error = GangFailedError(
                "the ranks could not go back to what they were before a change that one of them "
                "could not make; they would differ, so the gang was ended"
            )
            error.__cause__ = because
            self.gang.fail(error)
            raise error


def _is_adapted(module: nn.Module) -> bool:
    """Whether the module has adapters; image adapters count, which leave other processors."""
    has_images = getattr(module, "encoder_hid_proj", None) is not None
    return bool(getattr(module, "peft_config", None)) or has_images
