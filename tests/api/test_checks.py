"""What `wrap` and `unwrap` refuse, before anything starts."""

from __future__ import annotations

import importlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from torch import nn

import raymod
from raymod.errors import ConfigError, UnsupportedError
from raymod.gang import Gang
from raymod.module import make_stub
from tests import models
from tests.module.standin import Ranks

lock = threading.Lock()


class Pipe(SimpleNamespace):
    """As much of a pipeline as `wrap` looks at."""

    @property
    def components(self) -> dict[str, Any]:
        return vars(self)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a gang was started")

    monkeypatch.setattr(Gang, "start", started)


def stub() -> raymod.RemoteModule:
    module = nn.Linear(2, 2)
    return make_stub(module, Ranks(module), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("target", "component", "says"),
    [
        (3, None, "pipeline or an nn.Module, not a int"),
        (nn.Linear(2, 2), "transformer", "names a part of a pipeline"),
        (Pipe(vae=nn.Linear(2, 2)), None, "name the component: one of vae"),
        (Pipe(transformer=nn.Linear(2, 2)), "unet", "no component 'unet'; it has transformer"),
        (Pipe(transformer=None, unet=None), None, "has no modules"),
        (Pipe(transformer=None), "transformer", "is None"),
        (Pipe(scheduler=object()), "scheduler", "only an nn.Module can be wrapped"),
    ],
)
def test_targets(target: Any, component: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        raymod.wrap(target, component, workers=1)


def test_wrapping_twice() -> None:
    with pytest.raises(ConfigError, match=r"wrapped already.*raymod\.unwrap"):
        raymod.wrap(Pipe(transformer=stub()), workers=1)
    with pytest.raises(ConfigError, match="wrapped already"):
        raymod.wrap(stub(), workers=1)


def test_compiled_and_scripted_modules() -> None:
    compiled = torch.compile(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="_orig_mod"):
        raymod.wrap(compiled, workers=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parallel": raymod.ParallelConfig(), "workers": 2}, "workers say the same thing twice"),
        ({"parallel": {"workers": 2}}, "must be a raymod.ParallelConfig, not a dict"),
        ({"gang": {"start_timeout_s": 2}}, "must be a raymod.GangConfig"),
        ({"prepare": 1}, "must be a raymod.PrepareConfig"),
        ({"ulysses_degree": 2}, "ulysses_degree=2: Linear has no plan.*batch_degree"),
        ({"workers": 1, "weights": "magic"}, "magic"),
        ({"ring_degree": 2}, "ring_degree=2: Linear has no plan"),
        (
            {"ring_degree": 2, "prepare": raymod.PrepareConfig(attention_backend="sage")},
            "ring_degree=2 needs.*'sage' is none of native, _native_cudnn",
        ),
        ({"tp_degree": 4}, "tp_degree=4"),
    ],
)
def test_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        raymod.wrap(nn.Linear(2, 2), **options)


class _NoCache:
    pass


def _quantized() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = models.flux()[0]
    quantize_(module, Int8WeightOnlyConfig())
    return module


def _int8() -> Any:
    return importlib.import_module("torchao.quantization").Int8WeightOnlyConfig()


@pytest.mark.parametrize(
    ("make", "prepare", "says"),
    [
        (models.flux, {"attention_backend": "flsh"}, "'flsh' is none that diffusers has: .*native"),
        (nn.Linear, {"attention_backend": "native"}, "Linear has no set_attention_backend"),
        (nn.Linear, {"cache": FirstBlockCacheConfig()}, "Linear has no enable_cache"),
        (models.flux, {"cache": _NoCache()}, "one of diffusers' cache configs.*not _NoCache"),
        (_quantized, {"quantize": _int8}, "FluxTransformer2DModel are quantized already"),
        (models.flux, {"extra": lambda module, info: lock}, "cannot travel"),
    ],
)
def test_what_a_module_cannot_be_prepared_with(make: Any, prepare: Any, says: str) -> None:
    made = make(2, 2) if make is nn.Linear else make()
    module = made[0] if isinstance(made, tuple) else made
    prepare = {name: value() if value is _int8 else value for name, value in prepare.items()}
    with pytest.raises(raymod.RaymodError, match=says):
        raymod.wrap(module, workers=1, prepare=raymod.PrepareConfig(**prepare))


def test_quantize_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _int8()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torchao: pip install 'raymod\[torchao\]'"):
        raymod.wrap(models.flux()[0], workers=1, prepare=raymod.PrepareConfig(quantize=config))


def test_quantize_would_lose_weights_that_nobody_keeps() -> None:
    with pytest.raises(ConfigError, match=r"keep_local=False with quantize.*keep_local=True"):
        raymod.wrap(
            models.flux()[0],
            workers=1,
            keep_local=False,
            prepare=raymod.PrepareConfig(quantize=_int8()),
        )


def test_unwrap_needs_something_wrapped() -> None:
    with pytest.raises(ConfigError, match="no component"):
        raymod.unwrap(Pipe(transformer=nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"component 'unet'.*not wrapped"):
        raymod.unwrap(Pipe(unet=nn.Linear(2, 2), transformer=stub()), "unet")
    with pytest.raises(ConfigError, match="name one: transformer, transformer_2"):
        raymod.unwrap(Pipe(transformer=stub(), transformer_2=stub()))
    with pytest.raises(ConfigError, match=r"pipeline or an nn\.Module"):
        raymod.unwrap("pipe")


def test_unwrap_puts_the_very_object_back() -> None:
    module = nn.Linear(2, 2)
    ranks = Ranks(module)
    pipe = Pipe(transformer=make_stub(module, ranks, device=torch.device("cpu")))
    assert raymod.unwrap(pipe) is module
    assert pipe.transformer is module
    assert ranks.closes == 1


def test_what_cannot_be_split_by_sequence_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(Exception):
        pass

    def stop(*args: Any) -> Any:
        raise Stopped

    monkeypatch.undo()
    monkeypatch.setattr("raymod.gang.core.start", stop)
    says = "Linear does not say where its sequence can be cut.*divided by batch only"
    with pytest.warns(UserWarning, match=says) as caught, pytest.raises(Stopped):
        raymod.wrap(nn.Linear(2, 2), workers=2)
    assert [str(warning.filename) for warning in caught] == [__file__]


@pytest.mark.filterwarnings("error")
def test_degrees_that_were_asked_for_are_no_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("raymod.gang.core.start", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        raymod.wrap(nn.Linear(2, 2), batch_degree=2)
