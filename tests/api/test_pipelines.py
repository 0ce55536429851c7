"""The whole trip on real ranks: what a wrapped pipeline gives is what the plain one gives."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raymod
from raymod.demo import load_pipeline
from tests import models
from tests.api.modules import Denoiser, Echo, Wrapped

pytestmark = pytest.mark.gang

TOLERANCE = 1e-5


def difference(first: Any, second: Any) -> float:
    one, other = torch.as_tensor(first), torch.as_tensor(second)
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    return float((one - other).abs().max() / max(1.0, float(one.abs().max())))


def make(pipe: Any, prompts: list[str], size: int = 32, steps: int = 3) -> Any:
    return pipe(
        prompts,
        height=size,
        width=size,
        max_sequence_length=16,
        num_inference_steps=steps,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
        output_type="np",
    ).images


@pytest.fixture(scope="class")
def pipe() -> Any:
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="class")
def plain(pipe: Any) -> dict[str, Any]:
    return {
        "transformer": pipe.transformer,
        "one": make(pipe, ["a handwritten seven"]),
        "two": make(pipe, ["a handwritten two", "the digit 9"]),
        "odd": make(pipe, ["a handwritten three"], size=40),
    }


@pytest.fixture(scope="class")
def wrapped(pipe: Any, plain: Any, ray_for_tests: Any) -> Iterator[Any]:
    ray_for_tests.ensure()
    with raymod.wrap(pipe, workers=2):
        yield pipe
        raymod.unwrap(pipe)


def _what_was_put_off(worker: Any) -> list[str]:
    import sys

    from raymod.worker.imports import PUT_OFF

    return [name for name in PUT_OFF if name in sys.modules]


class TestDemoPipeline:
    """One pipeline with one gang for all of these."""

    def test_it_is_split_by_sequence(self, wrapped: Any) -> None:
        report = wrapped.transformer.report
        assert "by sequence over 2" in report.split
        assert [info.rank for info in report.ranks] == [0, 1]
        assert len({info.pid for info in report.ranks}) == 2
        assert all(seconds >= 0 for seconds in report.phases.values())

    @pytest.mark.parametrize(
        ("name", "prompts", "size"),
        [
            ("one", ["a handwritten seven"], 32),
            ("two", ["a handwritten two", "the digit 9"], 32),
            ("odd", ["a handwritten three"], 40),  # 25 tokens, and 3 heads always
        ],
    )
    def test_same_pictures(
        self, wrapped: Any, plain: Any, name: str, prompts: list[str], size: int
    ) -> None:
        assert difference(plain[name], make(wrapped, prompts, size)) <= TOLERANCE

    def test_ranks_import_no_more_than_they_need(self, wrapped: Any) -> None:
        make(wrapped, ["a handwritten one"], steps=1)
        assert wrapped.transformer.gang.call_all(_what_was_put_off) == [[], []]

    def test_the_pipeline_still_knows_itself(self, wrapped: Any, plain: Any) -> None:
        stub = wrapped.transformer
        assert isinstance(stub, raymod.RemoteModule)
        assert isinstance(stub, type(plain["transformer"]))
        assert wrapped.components["transformer"] is stub
        assert wrapped.device == wrapped._execution_device == torch.device("cpu")
        assert wrapped.dtype == torch.float32
        assert "FluxTransformer2DModel" in repr(wrapped)
        assert wrapped.to("cpu") is wrapped
        assert wrapped.transformer is stub

    def test_it_saves_as_it_would_plain(self, wrapped: Any, plain: Any, tmp_path: Any) -> None:
        wrapped.save_pretrained(tmp_path)
        again = type(wrapped).from_pretrained(tmp_path)
        again.set_progress_bar_config(disable=True)
        assert np.array_equal(make(again, ["a handwritten seven"]), plain["one"])

    def test_a_second_pipeline_of_the_same_parts(self, wrapped: Any, plain: Any) -> None:
        second = type(wrapped)(**wrapped.components)
        second.set_progress_bar_config(disable=True)
        assert difference(plain["one"], make(second, ["a handwritten seven"])) <= TOLERANCE

    def test_copies_are_refused(self, wrapped: Any) -> None:
        with pytest.raises(raymod.UnsupportedError, match=r"raymod\.unwrap"):
            copy.deepcopy(wrapped)

    def test_wrapping_again_says_so(self, wrapped: Any) -> None:
        with pytest.raises(raymod.ConfigError, match="wrapped already"):
            raymod.wrap(wrapped, workers=2)

    def test_a_wrong_input_costs_no_gang(self, wrapped: Any, plain: Any) -> None:
        with (
            pytest.raises(raymod.RankError, match=r"float32\[1, 64, 5\]") as caught,
            torch.no_grad(),
        ):
            wrapped.transformer(
                hidden_states=torch.randn(1, 64, 5),
                encoder_hidden_states=torch.randn(1, 16, 32),
                pooled_projections=torch.randn(1, 32),
                timestep=torch.tensor([0.5]),
                img_ids=torch.zeros(64, 3),
                txt_ids=torch.zeros(16, 3),
            )
        assert "Traceback on rank" in str(caught.value)
        assert difference(plain["one"], make(wrapped, ["a handwritten seven"])) <= TOLERANCE

    def test_dtype_changes_on_the_ranks_too(self, wrapped: Any, plain: Any) -> None:
        stub = wrapped.transformer
        stub.to(torch.float64)
        dtypes = stub.gang.call_all(_dtype_of_module)
        assert dtypes == [torch.float64] * 2
        stub.to(torch.float32)
        assert difference(plain["one"], make(wrapped, ["a handwritten seven"])) <= TOLERANCE


def _dtype_of_module(worker: Any) -> torch.dtype:
    return next(worker.module.parameters()).dtype


def test_unwrap_gives_the_very_object_back(ray_session: Any) -> None:
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    transformer = pipe.transformer
    before = dict(vars(transformer))
    weights = {name: value.clone() for name, value in transformer.state_dict().items()}
    stub = raymod.wrap(pipe, workers=1)
    make(pipe, ["a handwritten one"], steps=1)
    assert raymod.unwrap(pipe) is transformer
    assert pipe.transformer is transformer
    assert stub.closed
    assert vars(transformer) == before
    assert all(
        torch.equal(value, weights[name]) for name, value in transformer.state_dict().items()
    )
    with pytest.raises(raymod.StubClosedError):
        stub(hidden_states=None)


@pytest.mark.parametrize(
    ("family", "ranks", "batch"), [("flux2", 3, 2), ("wan", 2, 1), ("qwenimage", 4, 2)]
)
def test_other_families(ray_session: Any, family: str, ranks: int, batch: int) -> None:
    module, make_inputs = getattr(models, family)()
    module.eval()
    inputs = make_inputs(batch, return_dict=True)
    with torch.no_grad():
        expected = module(**inputs)
        with raymod.wrap(module, ulysses_degree=ranks) as stub:
            first, second = stub(**inputs), stub(**inputs)
            inputs["return_dict"] = False
            as_tuple = stub(**inputs)
    for output in (first, second):
        assert type(output) is type(expected)
        assert difference(expected.sample, output.sample) <= TOLERANCE
    assert type(as_tuple) is tuple
    assert difference(expected.sample, as_tuple[0]) <= TOLERANCE


def test_a_plain_module_is_split_by_batch_and_says_so(ray_session: Any) -> None:
    module = Denoiser()
    x, t = torch.randn(3, 5, 8), torch.rand(3)
    with torch.no_grad():
        expected = module(x, t)
        with pytest.warns(UserWarning, match="divided by batch only"):
            stub = raymod.wrap(module, workers=2)
        with stub:
            assert difference(expected, stub(x, t)) <= TOLERANCE
            assert difference(expected, stub(x, t=t)) <= TOLERANCE
            with pytest.warns(UserWarning, match="batch"):
                alone = stub(x[:1], t[:1])
            assert difference(expected[:1], alone) <= TOLERANCE
            with pytest.raises(ValueError, match="expected 8 channels"):
                stub(torch.randn(3, 5, 7), t)
            assert difference(expected, stub(x, t)) <= TOLERANCE


def test_whatever_nests(ray_session: Any) -> None:  # R56
    call = (
        torch.randn(3, 2),
        [None, True, 1.5, "text", torch.arange(4), (torch.randn(2).bfloat16(), [])],
        {"a": {"b": torch.randn(()), "c": Wrapped(torch.randn(2, 2), "label")}},
    )
    options = {"scale": 0.5, "mask": torch.tensor([True, False]), "names": {"x": (1, 2)}}
    module = Echo()
    with torch.no_grad():
        expected = module(*call, **options)
        with raymod.wrap(module, workers=1) as stub:
            output = stub(*call, **options)
    assert same(output, expected)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Wrapped):
        return one.label == other.label and same(one.value, other.value)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_freed_local_weights_come_back(ray_session: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    parameters = dict(module.named_parameters())
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = module(x)
        stub = raymod.wrap(module, workers=1, keep_local=False)
        assert all(parameter.is_meta for parameter in module.parameters())
        assert difference(expected, stub(x)) <= TOLERANCE
        assert raymod.unwrap(stub) is module
        assert torch.equal(module(x), expected)
    assert all(parameters[name] is value for name, value in module.named_parameters())


def test_a_loader_runs_on_the_ranks(ray_session: Any) -> None:
    module = Denoiser()

    def load() -> nn.Module:
        torch.manual_seed(3)
        return Denoiser()

    x, t = torch.randn(2, 5, 8), torch.rand(2)
    with torch.no_grad():
        expected = load()(x, t)
        with raymod.wrap(module, batch_degree=2, weights=load) as stub:
            assert difference(expected, stub(x, t)) <= TOLERANCE


def test_a_failed_wrap_leaves_the_pipeline_as_it_was(ray_session: Any) -> None:
    pipe = load_pipeline()
    transformer = pipe.transformer

    def broken() -> nn.Module:
        raise RuntimeError("no such checkpoint")

    with pytest.raises(raymod.GangStartError, match="no such checkpoint"):
        raymod.wrap(pipe, workers=1, weights=broken)
    assert pipe.transformer is transformer


def test_two_pipelines_with_a_gang_each(ray_session: Any) -> None:
    """They run at once; one is closed from another thread in the middle, and the other goes on."""
    pipes = [load_pipeline(), load_pipeline()]
    with torch.no_grad():
        for parameter in pipes[1].transformer.parameters():
            parameter *= 1.05
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    prompt = ["a handwritten seven"]
    expected = [make(pipe, prompt) for pipe in pipes]
    assert difference(*expected) > 1e-3
    stubs = [
        raymod.wrap(pipe, workers=workers) for pipe, workers in zip(pipes, (2, 1), strict=True)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(make, pipes, [prompt, prompt]))
            for one, right in zip(found, expected, strict=True):
                assert difference(one, right) <= TOLERANCE
            endless = pool.submit(make, pipes[0], prompt, steps=5000)
            time.sleep(1.0)
            again = pool.submit(make, pipes[1], prompt)
            began = time.monotonic()
            stubs[0].close()
            assert time.monotonic() - began < 30
            assert isinstance(endless.exception(timeout=10), raymod.StubClosedError)
            assert difference(again.result(timeout=60), expected[1]) <= TOLERANCE
        assert raymod.unwrap(pipes[1]) is not stubs[1]
        assert difference(make(pipes[1], prompt), expected[1]) == 0
    finally:
        for stub in stubs:
            stub.close()
