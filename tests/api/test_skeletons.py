"""Modules that the driver never loads, and checkpoints that the ranks read themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import raymod
from raymod import weights
from raymod.demo import load_pipeline, model_path
from raymod.weights import mapped
from tests.api.modules import Denoiser, load_denoiser
from tests.api.test_pipelines import TOLERANCE, difference, make

pytestmark = pytest.mark.gang


def _digest(worker: Any) -> dict[str, Any]:
    """What a rank's weights are, in a few numbers each."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), float(tensor.double().sum()))
        for name, tensor in worker.module.state_dict().items()
    }


def _facts(module: nn.Module) -> dict[str, Any]:
    return _digest(type("Worker", (), {"module": module}))


@pytest.fixture(scope="module")
def plain() -> Any:
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def stub(ray_for_tests: Any) -> Iterator[Any]:
    ray_for_tests.ensure()
    with raymod.from_pretrained(model_path(), subfolder="transformer", workers=2) as stub:
        yield stub


@pytest.fixture(scope="module")
def pipe(stub: Any) -> Any:
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(model_path(), transformer=stub)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class TestFromPretrained:
    """One gang for all of these: the demo's transformer, which this process never loads."""

    def test_same_picture(self, pipe: Any, plain: Any) -> None:
        prompts = ["a handwritten seven", "the digit 9"]
        assert difference(make(plain, prompts), make(pipe, prompts)) <= TOLERANCE

    def test_the_stub_answers_like_the_model(self, stub: Any, plain: Any) -> None:
        model = plain.transformer
        assert isinstance(stub, type(model))
        assert isinstance(stub, raymod.RemoteModule)
        own = {"_name_or_path"}
        assert {k: v for k, v in stub.config.items() if k not in own} == {
            k: v for k, v in model.config.items() if k not in own
        }
        assert stub.dtype is model.dtype
        assert stub.device == torch.device("cpu")
        assert stub.num_parameters() == model.num_parameters()
        assert list(dict(stub.named_parameters())) == list(dict(model.named_parameters()))
        assert all(parameter.is_meta for parameter in stub.parameters())
        assert "by sequence over 2" in stub.report.split

    def test_the_pipeline_moves_it(self, pipe: Any, stub: Any, plain: Any) -> None:
        assert pipe.transformer is stub
        assert pipe.to("cpu").transformer is stub
        assert pipe.device == pipe._execution_device == torch.device("cpu")
        stub.to(torch.float64)
        assert stub.dtype is torch.float64
        stub.to(torch.float32)
        prompts = ["a handwritten three"]
        assert difference(make(plain, prompts), make(pipe, prompts)) <= TOLERANCE

    def test_the_ranks_weights_are_there_when_asked_for(self, stub: Any, plain: Any) -> None:
        state, expected = stub.state_dict(), plain.transformer.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert all(parameter.is_meta for parameter in stub.parameters())

    def test_the_pipeline_saves_it(self, pipe: Any, plain: Any, tmp_path: Path) -> None:
        pipe.save_pretrained(tmp_path)
        again = type(plain.transformer).from_pretrained(tmp_path, subfolder="transformer")
        assert _facts(again) == _facts(plain.transformer)


def test_unwrapping_a_skeleton_gives_a_whole_module(ray_session: Any, tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    from tests import models

    module, make_inputs = models.wan()
    module.save_pretrained(tmp_path)
    plain = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    stub = raymod.from_pretrained(tmp_path, torch_dtype=torch.bfloat16, workers=1)
    assert stub.gang.call_all(_digest) == [_facts(plain)]
    assert _facts(plain)["condition_embedder.time_embedder.linear_1.weight"][0] is torch.float32
    whole = raymod.unwrap(stub)
    assert stub.closed
    assert type(whole) is WanTransformer3DModel
    assert _facts(whole) == _facts(plain)
    inputs = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.ndim > 1 else value
        for name, value in make_inputs().items()
    }
    with torch.no_grad():
        assert torch.equal(whole(**inputs)[0], plain(**inputs)[0])


# --- from_loader ---------------------------------------------------------------------------------


def test_only_the_ranks_have_what_a_loader_loads(ray_session: Any) -> None:
    module = load_denoiser()
    x, t = torch.randn(4, 5, 8, dtype=torch.bfloat16), torch.rand(4)
    module.outer.bfloat16()
    with torch.no_grad(), raymod.from_loader(load_denoiser_in_bf16, batch_degree=2) as stub:
        assert isinstance(stub, Denoiser)
        assert all(parameter.is_meta for parameter in stub.parameters())
        assert {p.dtype for p in stub.parameters()} == {torch.bfloat16}
        assert torch.equal(stub.table, torch.arange(5.0))
        assert difference(module(x, t), stub(x, t)) <= TOLERANCE
        assert "by batch over 2" in stub.report.split
        assert _facts(raymod.unwrap(stub)) == _facts(module)


def load_denoiser_in_bf16() -> nn.Module:
    module = load_denoiser()
    module.outer.bfloat16()
    return module


def test_the_split_is_chosen_once_the_module_is_known(ray_session: Any) -> None:
    from tests import models

    _, make_inputs = models.flux()
    with torch.no_grad(), raymod.from_loader(load_flux, workers=2) as stub:
        assert "by sequence over 2" in stub.report.split
        expected = load_flux()(**make_inputs())
        assert difference(expected[0], stub(**make_inputs())[0]) <= TOLERANCE


def load_flux() -> nn.Module:
    from tests import models

    return models.flux()[0]


def test_a_split_that_the_module_does_not_have(ray_session: Any) -> None:
    with pytest.raises(raymod.UnsupportedError, match="ulysses_degree=2: Denoiser has no plan"):
        raymod.from_loader(load_denoiser, ulysses_degree=2)


@pytest.mark.parametrize(
    ("loaded", "says"),
    [(None, "the function that loads the module returned a NoneType"), (1 / 3, "a float")],
)
def test_a_loader_that_returns_no_module(ray_session: Any, loaded: Any, says: str) -> None:
    with pytest.raises(raymod.GangStartError, match=says):
        raymod.from_loader(lambda: loaded, workers=1)


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        (nn.Linear(1, 1), raymod.ConfigError, "takes a function without arguments.*Linear"),
        (3, raymod.ConfigError, "takes a function .* not int"),
        (lambda path: None, raymod.ConfigError, r"the loader must work without arguments"),
        (threading.Lock().locked, raymod.WeightsError, "the loader cannot be sent"),
    ],
)
def test_loaders_that_are_refused_before_anything_starts(
    function: Any, kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymod.gang import Gang

    monkeypatch.setattr(Gang, "start", lambda **options: pytest.fail("a gang was started"))
    with pytest.raises(kind, match=says):
        raymod.from_loader(function, workers=1)


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_by_path(ray_session: Any, tmp_path: Path) -> None:
    module, other = load_denoiser(), load_denoiser()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    with raymod.wrap(module, workers=2, batch_degree=2, weights=tmp_path) as stub:
        assert stub.gang.call_all(_digest) == [_facts(other)] * 2
        assert _facts(module) == _facts(load_denoiser())  # the local ones stay as they are


def test_a_skeleton_of_ones_own_with_a_checkpoint(ray_session: Any, tmp_path: Path) -> None:
    save_file(load_denoiser().state_dict(), tmp_path / "model.safetensors")
    skeleton = load_denoiser().to("meta")
    skeleton.table = torch.arange(5.0)
    with raymod.wrap(skeleton, workers=1, weights=tmp_path / "model.safetensors") as stub:
        assert stub.device == torch.device("cpu")
        assert stub.gang.call_all(_digest) == [_facts(load_denoiser())]
        assert _facts(raymod.unwrap(stub)) == _facts(load_denoiser())


def test_a_rank_that_cannot_read_the_checkpoint_is_named(ray_session: Any, tmp_path: Path) -> None:
    save_file(load_denoiser().state_dict(), tmp_path / "model.safetensors")
    with open(tmp_path / "model.safetensors", "rb") as file:
        path = f"/proc/self/fd/{file.fileno()}"  # another file, or none, in another process
        with pytest.raises(
            raymod.GangStartError, match=rf"rank \d on node [\d.]+ .*{path} (cannot|is another)"
        ):
            raymod.wrap(load_denoiser(), batch_degree=2, weights=path)


def test_auto_maps_and_where_it_cannot_sends(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    save_file(nn.Linear(300, 300).state_dict(), tmp_path / "model.safetensors")
    module = nn.Linear(300, 300)
    module.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    with raymod.wrap(module, batch_degree=2) as stub:
        assert stub.gang.call_all(_digest) == [_facts(module)] * 2
        assert stub.gang.call_all(_maps, str(tmp_path)) == [True, True]

    def elsewhere(path: str, *, stamped: bool) -> Any:
        found = weights.checkpoint.refer_to(path, stamped=stamped)
        return type(found)(found.path, found.size, found.head_bytes, found.digest, (0, 0, 0))

    monkeypatch.setattr(mapped, "refer_to", elsewhere)  # as on another machine
    with raymod.wrap(module, batch_degree=2) as stub:
        assert stub.gang.call_all(_digest) == [_facts(module)] * 2
        assert stub.gang.call_all(_maps, str(tmp_path)) == [False, False]


def _maps(worker: Any, folder: str) -> bool:
    with open("/proc/self/maps") as file:
        return folder in file.read()
