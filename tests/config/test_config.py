"""Options are judged on creation, with what was asked and what to change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize("kind", [ParallelConfig, PrepareConfig, GangConfig])
def test_frozen_and_keyword_only(kind: Any) -> None:
    config = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.workers = 3
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises(TypeError, match="no_such_option"):
        kind(no_such_option=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("workers", "batch_degree", "ulysses_degree", "ring_degree", "tp_degree")
        for value in (0, -1, 1.5, "2", True, False)
        if (name, value) != ("workers", 0) or value is False
    ],
)
def test_counts_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ParallelConfig(**{name: value})


def test_degrees_must_multiply_to_workers() -> None:
    with pytest.raises(ConfigError, match=r"batch_degree=2 x ulysses_degree=2 makes 4.*workers=3"):
        ParallelConfig(workers=3, batch_degree=2, ulysses_degree=2)
    assert ParallelConfig(workers=4, batch_degree=2, ulysses_degree=2).world_size == 4


def test_splits_of_later_versions_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"tp_degree=2.*ulysses_degree"):
        ParallelConfig(tp_degree=2)


@pytest.mark.parametrize("name", ["ring_degree", "tp_degree"])
def test_one_way_is_no_wish(name: str) -> None:
    assert ParallelConfig(**{name: 1}, workers=2).world_size == 2
    assert not ParallelConfig(**{name: 1}).has_degrees


def test_a_ring_is_taken_where_it_is_asked_for() -> None:
    config = ParallelConfig(ring_degree=2, ulysses_degree=2)
    assert config.world_size == 4
    assert config.degrees(sequence=True, default_world_size=9).sequence_degree == 4
    assert ParallelConfig(workers=4).degrees(sequence=True, default_world_size=9).ring_degree == 1


def test_workers_alone_take_the_sequence_where_there_is_a_plan() -> None:
    config = ParallelConfig(workers=4)
    assert config.degrees(sequence=True, default_world_size=9) == Degrees(ulysses_degree=4)
    assert config.degrees(sequence=False, default_world_size=9) == Degrees(batch_degree=4)
    nothing = ParallelConfig()
    assert nothing.world_size is None
    assert nothing.degrees(sequence=True, default_world_size=3).world_size == 3


def test_given_degrees_are_kept_whatever_the_model() -> None:
    config = ParallelConfig(batch_degree=3)
    assert config.degrees(sequence=True, default_world_size=9) == Degrees(batch_degree=3)


@pytest.mark.parametrize("name", ["start_timeout_s", "call_timeout_s", "close_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "10", None, True])
def test_every_limit_is_finite(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        GangConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"placement_strategy": "CLOSE"}, "placement_strategy='CLOSE'.*STRICT_PACK"),
        ({"bundle_indices": (0, 1)}, "needs a placement_group"),
        ({"placement_group": object(), "bundle_indices": (1, 1)}, "distinct"),
        ({"placement_group": object(), "bundle_indices": (-1,)}, "non-negative"),
        ({"env_vars": {"A": 1}}, "string"),
        ({"env_vars": [("A", "1")]}, "mapping"),
        ({"gpus_per_rank": -0.5}, "gpus_per_rank"),
        ({"forward_env": "yes"}, "forward_env"),
        ({"object_store_memory_bytes": 0}, "object_store_memory_bytes"),
    ],
)
def test_gang_options_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GangConfig(**options)


def test_extra_must_be_a_function() -> None:
    with pytest.raises(ConfigError, match="extra"):
        PrepareConfig(extra="not a function")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads"):
        PrepareConfig(threads=0)


def test_degrees_say_what_is_split() -> None:
    assert str(Degrees()) == "no split"
    assert str(Degrees(batch_degree=2, ulysses_degree=3)) == "batch_degree=2 x ulysses_degree=3"
