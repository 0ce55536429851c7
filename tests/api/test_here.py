"""`workers=0`: one rank in this process, by the code that ranks elsewhere run."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import ray
import torch
from diffusers import FirstBlockCacheConfig
from torch import nn

import raymod
from raymod.demo import load_pipeline, model_path
from tests.api.test_pipelines import difference, make
from tests.module.sequences import Sequence, flux
from tests.module.test_sequences import call

SEEN: list[int] = []
PROMPTS = ["a handwritten seven", "a four"]


class Noting(nn.Module):
    """Leaves a trace in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        SEEN.append(os.getpid())
        if fail:
            raise LookupError("asked to fail")
        x += 1
        return self.linear(x) + torch.rand(3)


def load() -> nn.Module:
    torch.manual_seed(0)
    return Noting()


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Ray was asked for")

    for name in ("init", "remote", "put", "get", "is_initialized"):
        monkeypatch.setattr(ray, name, started)


def test_a_pipeline() -> None:
    pipe = load_pipeline()
    expected = make(pipe, PROMPTS)
    module, threads = pipe.transformer, torch.get_num_threads()
    raymod.wrap(pipe, workers=0)
    assert isinstance(pipe.transformer, raymod.RemoteModule)
    assert pipe.transformer is not module
    assert difference(make(pipe, PROMPTS), expected) == 0
    report = pipe.transformer.report
    assert report.ranks[0].pid == os.getpid()
    assert "in this process" in report.split
    assert pipe.transformer.last_call.compute_s > 0
    assert torch.get_num_threads() == threads
    assert raymod.unwrap(pipe) is module
    assert difference(make(pipe, PROMPTS), expected) == 0


def test_any_sequence_of_changes() -> None:
    plain = flux()
    with raymod.wrap(flux(), workers=0) as stub:
        for _, change in Sequence(5, flux).steps(20):
            change(plain)
            change(stub)
            assert difference(call(plain, 0.6), call(stub, 0.6)) == 0


def test_it_is_prepared_as_ranks_are() -> None:  # R109
    def extra(module: nn.Module, info: raymod.RankInfo) -> nn.Module:
        SEEN.append(info.pid)
        return module

    SEEN.clear()
    plain = flux()
    plain.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    prepare = raymod.PrepareConfig(cache=FirstBlockCacheConfig(threshold=0.5), extra=extra)
    with raymod.wrap(flux(), workers=0, prepare=prepare) as stub:
        for _ in range(3):
            with plain.cache_context("cond"), stub.cache_context("cond"):
                assert difference(call(plain), call(stub)) == 0
    assert len(SEEN) == 1


def test_the_module_runs_here_on_copies() -> None:
    SEEN.clear()
    module = load()
    before = copy.deepcopy(module.state_dict())
    x = torch.zeros(3)
    with raymod.wrap(module, workers=0) as stub, torch.no_grad():
        torch.manual_seed(3)
        stub(x)
        drawn = torch.rand(1)
        assert set(SEEN) == {os.getpid()}
        assert torch.equal(x, torch.zeros(3))
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        with pytest.raises(LookupError, match="asked to fail") as caught:
            stub(x, fail=True)
        assert isinstance(caught.value, raymod.RankError)
        assert "in forward" in str(caught.value)
        stub(x)
        assert stub.gang.call_all(lambda worker, n: worker.rank + n, 4) == [4]
        with pytest.raises(raymod.ConfigError, match="there is 1 rank"):
            stub.gang.call_all("health", reply_rank=1)
        (health,) = stub.gang.health()
        assert health.calls == 2
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)  # the driver's random numbers are its own
    with pytest.raises(raymod.StubClosedError):
        stub(x)


def test_without_weights_in_the_driver() -> None:
    x = torch.zeros(3)
    with raymod.from_loader(load, workers=0) as stub, torch.no_grad():
        assert stub(x).shape == (3,)
        assert next(stub.parameters()).is_meta
    pipe = load_pipeline()
    expected = make(pipe, PROMPTS)
    with raymod.from_pretrained(model_path(), subfolder="transformer", workers=0) as stub:
        pipe.transformer = stub
        assert difference(make(pipe, PROMPTS), expected) == 0
        whole = raymod.unwrap(pipe)
    assert not next(whole.parameters()).is_meta
    assert difference(make(pipe, PROMPTS), expected) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_degree": 2}, "workers=0 is one rank in this process, which divides nothing"),
        ({"gang": raymod.GangConfig()}, "no gang= to configure"),
    ],
)
def test_what_one_rank_cannot_do(options: dict[str, Any], says: str) -> None:
    with pytest.raises(raymod.ConfigError, match=says):
        raymod.wrap(load(), workers=0, **options)


def test_its_ranks_are_not_shared() -> None:
    with (
        raymod.wrap(load(), workers=0) as stub,
        pytest.raises(raymod.ConfigError, match="wrap this one with workers=0 as well"),
    ):
        raymod.wrap(load(), gang=stub)
