"""A further module on the ranks of a gang that is up, for pipelines that call two in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError, GangError, GangFailedError, RaymodError, StubClosedError
from raymod.gang.core import Gang
from raymod.gang.deliver import deliver
from raymod.gang.ranks import Member
from raymod.gang.reports import CallReport, GangReport
from raymod.weights import Offer

__all__ = ["Tenant"]


class Tenant:
    """A module that shares the ranks of another one's gang. Made by `Tenant.start`.

    Calls of the two take turns. What ends the gang ends both; closing this one leaves the gang.

    Attributes:
        gang: The gang.
        report: How the module was put there.
        on_rebuilt: Called with this when the gang was started anew and has loaded this module too:
            gives the ranks what changed since.
    """

    def __init__(
        self, gang: Gang, seat: int, report: GangReport, put_again: Callable[[], Any] | None
    ) -> None:
        self.gang = gang
        self.report = report
        self._put_again = put_again
        self.on_rebuilt: Callable[[Any], None] | None = None
        self.last_call: CallReport | None = None
        self._seat = seat
        self._is_closed = False
        self._is_lost = False
        self._tell_next = gang.on_rebuilt
        gang.on_rebuilt = self._rebuilt

    @classmethod
    def start(
        cls,
        gang: Gang,
        *,
        load: Offer,
        degrees: Degrees,
        parallel: ParallelConfig,
        prepare: PrepareConfig,
        timeout_s: float,
        again: Callable[[], Offer] | None = None,
    ) -> Tenant:
        """Give the ranks one more module, all or none.

        Args:
            gang: The gang, which is up.
            load: Where the weights come from.
            degrees: As for `Gang.start`; their product is the gang's number of ranks.
            parallel: As for `Gang.start`.
            prepare: As for `Gang.start`.
            timeout_s: Limit for each of loading and splitting, in seconds.
            again: As for `Gang.start`.

        Raises:
            ConfigError: The degrees do not fit the gang.
            GangError: A rank could not load or prepare it.
        """
        if degrees.world_size != gang.world_size:
            raise ConfigError(
                f"{degrees} makes {degrees.world_size} ranks, but the gang to share has "
                f"{gang.world_size}"
            )
        seat = gang.next_seat()

        def ask(members: Sequence[Member], method: str, *args: Any) -> list[Any]:
            ranks = [member.rank for member in members]
            replies = gang.call_all(_on_some, seat, ranks, method, args, timeout_s=timeout_s)
            return [replies[rank] for rank in ranks]

        def put(load: Offer) -> tuple[Any, dict[str, float]]:
            began = time.monotonic()
            deliver(load, load.ticket, gang.members, ask)
            loaded = time.monotonic()
            options = {"degrees": degrees, "parallel": parallel, "config": prepare}
            reports = gang.call_all(_at, seat, "prepare", (), options, timeout_s=timeout_s)
            phases = {"loading": loaded - began, "splitting": time.monotonic() - loaded}
            return reports[0], phases

        def put_again() -> None:
            assert again is not None
            with again() as load:
                put(load)

        try:
            prepared, phases = put(load)
        except BaseException:
            with suppress(RaymodError):
                gang.call_all("forget", seat)
            raise
        warnings = tuple(dict.fromkeys([*load.warnings, *prepared.warnings]))
        report = GangReport(
            ranks=gang.report.ranks,
            phases=phases,
            split=prepared.split,
            warnings=warnings,
            near=gang.report.near,
        )
        return cls(gang, seat, report, None if again is None else put_again)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.gang.world_size

    @property
    def closed(self) -> bool:
        """Whether this module, or the gang, was closed."""
        return self._is_closed or self.gang.closed

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        contexts: tuple[tuple[str, Mapping[str, Any]], ...] = (),
    ) -> Any:
        """See `Gang.call`."""
        self._check()
        output = self.gang.call(args, kwargs, contexts, seat=self._seat)
        self.last_call = self.gang.last_call
        return output

    def call_all(
        self,
        method: str | Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        reply_rank: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """See `Gang.call_all`; the worker's `module` is this one."""
        self._check()
        return self.gang.call_all(
            _at, self._seat, method, args, kwargs, timeout_s=timeout_s, reply_rank=reply_rank
        )

    def health(self, timeout_s: float = 5.0) -> tuple[Any, ...]:
        """See `Gang.health`."""
        return self.gang.health(timeout_s)

    def restart(self) -> None:
        """See `Gang.restart`: it is the ranks of both modules that are started anew."""
        self._check()
        self.gang.restart()

    def fail(self, error: GangError) -> None:
        """See `Gang.fail`: it ends the other module too."""
        self.gang.fail(error)

    def close(self) -> None:
        """Let the ranks forget this module. The gang goes on."""
        first, self._is_closed = not self._is_closed, True
        if first and not self.gang.closed:
            with suppress(RaymodError):  # a gang that has ended holds nothing
                self.gang.call_all("forget", self._seat)

    def _check(self) -> None:
        if self._is_closed:
            raise StubClosedError("this module was closed; the gang that it shared may go on")
        if self._is_lost:
            raise GangFailedError(
                "the gang that this module shared was started anew without it, since nobody else "
                "had its weights (keep_local=False)"
            )

    def _rebuilt(self, gang: Gang) -> None:
        if self._tell_next is not None:
            self._tell_next(gang)
        if self._is_closed:
            return
        if self._put_again is None:
            self._is_lost = True
            return
        self._put_again()
        self.report = replace(self.report, ranks=gang.report.ranks, near=gang.report.near)
        gang.resume(self._seat)
        if self.on_rebuilt is not None:
            self.on_rebuilt(self)


def _at(
    worker: Any,
    seat: int,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run something on a rank as if the module at `seat` were its only one."""
    with worker.at(seat):
        if callable(method):
            return method(worker, *args, **kwargs)
        return getattr(worker, method)(*args, **kwargs)


def _on_some(
    worker: Any, seat: int, ranks: Sequence[int], method: str, args: tuple[Any, ...]
) -> Any:
    """Run a step of the loading on those ranks that it is for."""
    if worker.rank not in ranks:
        return None
    found = tuple(ray.get(arg) if isinstance(arg, ray.ObjectRef) else arg for arg in args)
    return _at(worker, seat, method, found, {})
