"""Every exception that raymod raises on purpose.

    RaymodError
    ├── ConfigError (ValueError)             what was asked cannot be
    │   └── UnsupportedError (NotImplementedError)   refused by name, with what to do instead
    ├── PackError (TypeError)                an argument or output that cannot travel
    ├── WeightsError                         weights that cannot be moved, read or freed
    ├── SplitError                           a split that does not reproduce the model
    ├── StubClosedError                      the stub was closed
    └── GangError                            something happened to the ranks
        ├── GangStartError                   they never became ready; also what a rank raised
        │   ├── CapacityError                fewer devices than wanted
        │   └── StartTimeoutError (TimeoutError)
        ├── RankError                        a rank raised; also an instance of what it raised
        ├── RankDiedError                    a rank's process is gone
        ├── CallTimeoutError (TimeoutError)  no answer within the limit
        └── GangFailedError                  used after one of the above ended it

A rank describes what it raised as a [`RankFailure`][raymod.errors.RankFailure]; the driver turns
the failures of all ranks into one [`RankError`][raymod.errors.RankError].
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = [
    "CallTimeoutError",
    "CapacityError",
    "ConfigError",
    "GangError",
    "GangFailedError",
    "GangStartError",
    "PackError",
    "RankDiedError",
    "RankError",
    "RankFailure",
    "RaymodError",
    "SplitError",
    "StartTimeoutError",
    "StubClosedError",
    "UnsupportedError",
    "WeightsError",
]


_Error = TypeVar("_Error", bound="RaymodError")


class RaymodError(Exception):
    """Base of everything that raymod raises on purpose."""


class ConfigError(RaymodError, ValueError):
    """What was asked cannot be: an option, a degree, a type."""


class UnsupportedError(ConfigError, NotImplementedError):
    """raymod refuses this by name and says what to do instead."""


class PackError(RaymodError, TypeError):
    """An argument or an output that cannot travel between driver and ranks."""


class WeightsError(RaymodError):
    """Weights that cannot be moved, read or freed."""


class SplitError(RaymodError):
    """The split model did not reproduce the output of the whole one."""


class StubClosedError(RaymodError):
    """The stub was closed; it has no ranks any more."""


class GangError(RaymodError):
    """Something happened to the ranks."""


class GangStartError(GangError):
    """The ranks never became ready; nothing of them is left.

    Where a rank raised or died meanwhile, it is also a `RankError` or a `RankDiedError`, and an
    instance of the class of what the rank raised.
    """

    @classmethod
    def by(cls, text: str, error: Exception) -> GangStartError:
        """One for `error`, of whose class it is as well; `text` is what it says."""
        return _dual(cls(text), error, {"__reduce__": lambda it: (cls.by, (it.args[0], error))})


class CapacityError(GangStartError):
    """The cluster has fewer free devices than the gang wants."""


class StartTimeoutError(GangStartError, TimeoutError):
    """A phase of the start took longer than `GangConfig.start_timeout_s`."""


class RankDiedError(GangError):
    """The process of a rank is gone."""


class CallTimeoutError(GangError, TimeoutError):
    """The ranks did not answer within the limit."""


class GangFailedError(GangError):
    """The gang ended in an earlier failure, which is the `__cause__`."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What one rank raised, in a form that always pickles.

    Attributes:
        rank: The rank that raised.
        node: Address of its node.
        type_name: Qualified name of the exception's class.
        message: The exception's own text.
        traceback: The formatted traceback on the rank.
        pickled: The exception itself, pickled, or None if it does not pickle.
        secondary: True if the rank only noticed that another one was gone.
    """

    rank: int
    node: str
    type_name: str
    message: str
    traceback: str
    pickled: bytes | None = None
    secondary: bool = False

    @classmethod
    def of(cls, error: BaseException, *, rank: int, node: str) -> RankFailure:
        """Describe `error`, caught on `rank`."""
        kind = type(error)
        return cls(
            rank=rank,
            node=node,
            type_name=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            pickled=_pickled(error),
            secondary=_is_secondary(error),
        )

    def exception(self) -> BaseException | None:
        """The exception itself, or None where it could not travel."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # a class that this process cannot import
            return None
        return error if isinstance(error, BaseException) else None


class RankError(GangError):
    """A rank raised. Also an instance of the class of what was raised, where that is possible.

    Attributes:
        failures: What each failing rank raised, in rank order.
        rank: The rank whose failure is shown: the first that did not merely notice another's.
        remote_traceback: Its traceback, as formatted there.
    """

    failures: tuple[RankFailure, ...]

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))
        first = self._first()
        self.rank = first.rank
        self.remote_traceback = first.traceback
        super().__init__(self._text(first))

    @classmethod
    def from_failures(cls, failures: Sequence[RankFailure]) -> RankError:
        """One exception for `failures` (at least one), of the first one's own class as well."""
        plain = cls(failures)
        cause = plain._first().exception()
        error = plain
        if isinstance(cause, Exception):
            error = _dual(plain, cause, {"__reduce__": RankError.__reduce__})
        error.__cause__ = cause
        return error

    def _first(self) -> RankFailure:
        return next((f for f in self.failures if not f.secondary), self.failures[0])

    def _text(self, first: RankFailure) -> str:
        others = [f.rank for f in self.failures if f is not first]
        named = f"rank{'s'[: len(others) > 1]} {', '.join(map(str, others))}"
        also = f" ({named} failed too)" if others else ""
        return (
            f"rank {first.rank} on node {first.node} raised {first.type_name}: "
            f"{first.message}{also}\n\n"
            f"Traceback on rank {first.rank}:\n{first.traceback.rstrip()}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError.from_failures, (self.failures,)


def _dual(plain: _Error, other: Exception, methods: Mapping[str, Any]) -> _Error:
    """`plain` with the class of `other` added, so that the caller's own `except` still catches."""
    own, kind = type(plain), type(other)
    if isinstance(plain, kind):
        return plain
    try:
        methods = {"__module__": own.__module__, "__str__": _said, **methods}
        both: Any = type(own.__name__, (own, kind), methods)
        error = both.__new__(both)
        error.__dict__.update(other.__dict__)
        error.__dict__.update(plain.__dict__)
        error.args = plain.args
    except Exception:  # classes whose layouts or constructors do not combine
        return plain
    return error if isinstance(error, own) else plain


def _said(error: Exception) -> str:
    return str(error.args[0])


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some exceptions pickle and then do not come back
    except Exception:
        return None
    return data


_SECONDARY_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


def _is_secondary(error: BaseException) -> bool:
    """Whether `error` is what a collective says when another rank has gone."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _SECONDARY_WORDS)
