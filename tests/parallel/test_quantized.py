"""Quantized weights: made so on the ranks, or by whoever loads the module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn

import raymod
from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError, UnsupportedError
from raymod.prepare import prepare
from tests import models
from tests.parallel.test_sequence import World


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("BitsAndBytesConfig", {"load_in_8bit": True}, "on a GPU only.*Model.from_pretrained"),
        ("QuantoConfig", {"weights_dtype": "int8"}, "quanto while a checkpoint is read"),
        ("GGUFQuantizationConfig", {}, "GGUF is the format of a file.*Model.from_single_file"),
    ],
)
def test_what_only_a_loader_can_do_is_refused(name: str, options: Any, says: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        config = getattr(diffusers, name)(**options)
    with pytest.raises(UnsupportedError, match=f"quantize={name}: .*{says}"):
        PrepareConfig(quantize=config)


def test_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a torchao config"):
        PrepareConfig(quantize="int8")


@pytest.mark.parametrize("kind", ["torchao", "diffusers"])
@pytest.mark.parametrize("degrees", [{"ulysses_degree": 2}, {"batch_degree": 2}])
def test_quantized_and_split(ranks: World, degrees: dict[str, int], kind: str) -> None:  # R108
    for change in ranks(2)(quantized, degrees, kind):
        assert 0 < change < 0.1


def quantized(degrees: dict[str, int], kind: str) -> float:
    """How far a quantized, split module is from the local one; equals the quantized local one."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module, make_inputs = models.flux()
    alike = copy.deepcopy(module)
    quantize_(alike, Int8WeightOnlyConfig())
    config: Any = Int8WeightOnlyConfig()
    if kind == "diffusers":
        config = diffusers.TorchAoConfig(config)
    local = copy.deepcopy(module)
    ready = prepared(module, degrees, PrepareConfig(threads=1, quantize=config))
    for ours, theirs in zip(ready.module.parameters(), alike.parameters(), strict=True):
        assert type(ours) is type(theirs)
        assert torch.equal(whole(ours), whole(theirs))
    call = make_inputs(2)
    with torch.no_grad():
        plain, same = local(**call)[0], alike(**call)[0]
    check(ready, call, same)
    return float((plain - same).abs().max() / plain.abs().max())


def prepared(module: nn.Module, degrees: dict[str, int], config: PrepareConfig) -> Any:
    return prepare(
        module,
        degrees=Degrees(**degrees),
        parallel=ParallelConfig(**degrees),
        prepare=config,
        device=torch.device("cpu"),
    )


def whole(weight: Any) -> torch.Tensor:
    values: torch.Tensor = weight.dequantize() if hasattr(weight, "qdata") else weight
    return values


def check(ready: Any, call: dict[str, Any], expected: torch.Tensor) -> None:
    """This rank's part of a call's output, if it has one, is as expected."""
    output = ready((), call).output
    if output is None:
        return
    own = len(output[0])
    first = 0 if dist.get_rank() == 0 else len(expected) - own
    part = expected[first : first + own]
    assert float((output[0] - part).abs().max()) <= 1e-5 * float(part.abs().max())


# --- quantized by who loads ----------------------------------------------------------------------


def from_gguf(folder: str) -> nn.Module:
    module: nn.Module = diffusers.QwenImageTransformer2DModel.from_single_file(
        f"{folder}/model.gguf",
        config=folder,
        subfolder="transformer",
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    return module


def from_torchao(folder: str) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig

    module: nn.Module = diffusers.QwenImageTransformer2DModel.from_pretrained(
        folder,
        subfolder="transformer",
        quantization_config=diffusers.TorchAoConfig(Int8WeightOnlyConfig()),
        torch_dtype=torch.float32,
    )
    return module


LOADERS = {"gguf": from_gguf, "torchao": from_torchao}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, as diffusers saves it and as a GGUF file."""
    import gguf

    path = tmp_path_factory.mktemp("quantized")
    module, _ = models.FAMILIES["qwenimage"]()
    module.save_pretrained(path / "transformer")
    writer = gguf.GGUFWriter(str(path / "model.gguf"), "qwen_image")
    for name, tensor in module.state_dict().items():
        values = tensor.numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0:  # whole blocks
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("kind", LOADERS)
def test_loaded_so_and_split(ranks: World, folder: str, kind: str) -> None:
    for change in ranks(2)(loaded, LOADERS[kind], folder):
        assert 0 < change < 0.1


def loaded(load: Callable[[str], nn.Module], folder: str) -> float:
    """How far a module that was loaded quantized is from the plain one, which it is split like."""
    module, local = load(folder), load(folder)
    exact, make_inputs = models.FAMILIES["qwenimage"]()
    call = make_inputs(2)
    with torch.no_grad():
        plain, same = exact(**call)[0], local(**call)[0]
    check(prepared(module, {"ulysses_degree": 2}, PrepareConfig(threads=1)), call, same)
    return float((plain - same).abs().max() / plain.abs().max())


@pytest.mark.parametrize("kind", LOADERS)
def test_it_travels_as_it_is(folder: str, kind: str) -> None:
    call = models.FAMILIES["qwenimage"]()[1](2)
    module = LOADERS[kind](folder)
    with torch.no_grad():
        expected = module(**call)[0]
        with raymod.wrap(module, workers=0) as stub:
            assert torch.equal(stub(**call)[0], expected)
            types = [type(p) for p in module.parameters()]
            assert stub.gang.call_all(types_on_rank) == [types]


def types_on_rank(worker: Any) -> list[type]:
    return [type(p) for p in worker.module.parameters()]


@pytest.mark.parametrize("kind", LOADERS)
def test_only_the_ranks_have_what_a_loader_quantizes(folder: str, kind: str) -> None:
    call = models.FAMILIES["qwenimage"]()[1](2)
    load = LOADERS[kind]
    with torch.no_grad():
        expected = load(folder)(**call)[0]
        with raymod.from_loader(lambda: load(folder), workers=0) as stub:
            assert all(parameter.is_meta for parameter in stub.parameters())
            assert torch.equal(stub(**call)[0], expected)
            with pytest.raises(raymod.WeightsError, match="the ranks hold quantized weights"):
                raymod.unwrap(stub)
            assert torch.equal(stub(**call)[0], expected)
