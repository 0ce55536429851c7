"""A cache config's function stays on the driver; what it returns travels with each call."""

from __future__ import annotations

import pickle

import diffusers
import pytest
import torch

from raymod.api.options import options
from raymod.calls import pack, unpack
from raymod.calls.values import CONTEXT, DriverValues, TravelledValue, arrived
from raymod.config import PrepareConfig
from raymod.errors import ConfigError


class Pipe:
    current_timestep = torch.tensor(980.0)

    def __reduce__(self) -> object:
        raise TypeError("the driver's pipeline must not travel")


def pyramid(pipe: Pipe) -> diffusers.PyramidAttentionBroadcastConfig:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        current_timestep_callback=lambda: pipe.current_timestep,
    )


def test_the_value_of_each_call_arrives() -> None:
    pipe, values = Pipe(), DriverValues()
    config = pyramid(pipe)
    sent = unpack(pack(values.take(config)))
    with pytest.raises(ConfigError, match="travels with each call"):
        sent.current_timestep_callback()
    for value in (980.0, 20.0):
        pipe.current_timestep = torch.tensor(value)
        ((name, fields),) = pickle.loads(pickle.dumps(values.contexts()))
        assert name == CONTEXT
        arrived(fields)
        assert sent.current_timestep_callback() == value
    assert config.current_timestep_callback() == 20.0  # the user's own is as it was


def test_the_same_config_as_an_option() -> None:
    asked = options(None, PrepareConfig(cache=pyramid(Pipe())), None, workers=2)
    assert isinstance(asked.prepare.cache.current_timestep_callback, TravelledValue)
    assert len(asked.values.contexts()) == 1


def test_configs_without_a_function_send_nothing() -> None:
    values = DriverValues()
    config = diffusers.FirstBlockCacheConfig()
    assert values.take(config) is config
    assert values.contexts() == ()


def test_no_function() -> None:
    config = diffusers.PyramidAttentionBroadcastConfig(current_timestep_callback=980)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a function, not 980"):
        DriverValues().take(config)
