"""One exception for what several ranks raised."""

from __future__ import annotations

import pickle

import pytest

from raymod import errors
from raymod.errors import RankError, RankFailure, RaymodError


class NeedsTwo(Exception):
    """Pickles, but does not come back: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def failure(error: Exception, rank: int = 0) -> RankFailure:
    try:
        raise error
    except Exception as caught:
        return RankFailure.of(caught, rank=rank, node="10.0.0.7")


def test_every_public_error_has_the_common_base() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert kind is RankFailure or issubclass(kind, RaymodError), name


def test_timeouts_are_timeouts() -> None:
    assert issubclass(errors.CallTimeoutError, TimeoutError)
    assert issubclass(errors.StartTimeoutError, TimeoutError)


def test_a_rank_error_is_what_the_rank_raised() -> None:
    error = RankError.from_failures([failure(ValueError("bad shape"), rank=1)])
    assert isinstance(error, ValueError)
    assert isinstance(error.__cause__, ValueError)
    text = str(error)
    assert text.startswith("rank 1 on node 10.0.0.7 raised ValueError: bad shape")
    assert "Traceback on rank 1" in text
    assert "in failure" in text  # the rank's own frames


def test_the_first_cause_wins_over_what_the_others_noticed() -> None:
    noticed = failure(RuntimeError("[gloo] Connection closed by peer"), rank=0)
    cause = failure(KeyError("blocks"), rank=2)
    error = RankError.from_failures([noticed, cause])
    assert error.rank == 2
    assert isinstance(error, KeyError)
    assert "rank 0 failed too" in str(error)
    assert error.failures == (noticed, cause)


@pytest.mark.parametrize("error", [ValueError("x"), NeedsTwo("a", "b"), OSError(2, "gone")])
def test_rank_errors_pickle(error: Exception) -> None:
    before = RankError.from_failures([failure(error)])
    after = pickle.loads(pickle.dumps(before))
    assert isinstance(after, RankError)
    assert str(after) == str(before)
    assert after.failures == before.failures


@pytest.mark.parametrize("kind", [ValueError, errors.WeightsError, OSError, errors.ConfigError])
def test_a_start_error_is_what_stood_in_the_way(kind: type[Exception]) -> None:
    cause = RankError.from_failures([failure(kind("no model"), rank=1)])
    before = errors.GangStartError.by("the gang did not start", cause)
    for error in (before, pickle.loads(pickle.dumps(before))):
        assert isinstance(error, errors.GangStartError)
        assert isinstance(error, RankError)
        assert isinstance(error, kind)
        assert type(error).__name__ == "GangStartError"
        assert str(error) == "the gang did not start"
        assert error.failures == cause.failures


def test_a_start_error_of_a_rank_that_died() -> None:
    error = errors.GangStartError.by("the gang did not start", errors.RankDiedError("killed"))
    assert isinstance(error, errors.RankDiedError)
    assert str(pickle.loads(pickle.dumps(error))) == "the gang did not start"


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    class Local(Exception):
        pass

    told = failure(Local("only here"))
    assert told.pickled is None
    error = RankError.from_failures([told])
    assert type(error) is RankError
    assert "Local: only here" in str(error)
