"""Skeletons: a model that is only in a folder comes out as its own `from_pretrained` loads it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raymod import weights
from raymod.errors import ConfigError, UnsupportedError, WeightsError
from raymod.weights.skeleton import no_parameters
from tests import models
from tests.weights.ranks import digest_of, memory_kib, tensors_of
from tests.weights.small import Small, save, small
from tests.weights.test_offer import Zoo

FAMILIES = ["flux", "wan", "qwenimage"]  # plain; parts kept in fp32; complex tables of its own


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A class, and folders of one model by dtype."""
    module, _ = models.FAMILIES[request.param]()
    folders = {}
    for dtype in (torch.float32, torch.bfloat16):
        folders[dtype] = str(tmp_path_factory.mktemp(request.param) / "model")
        module.to(dtype).save_pretrained(folders[dtype])
    return type(module), folders


@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [None, torch.bfloat16, torch.float16])
def test_as_from_pretrained_loads_it(saved: Any, there: Any, wanted: Any) -> None:
    cls, folders = saved
    plain = cls.from_pretrained(folders[there], torch_dtype=wanted)
    made = weights.read_pretrained(folders[there], torch_dtype=wanted)
    assert type(made.module) is cls
    assert dict(made.module.config) == dict(plain.config)
    with made.offer as offered:
        copy = weights.load(offered.ticket)
    assert digest_of(copy) == digest_of(plain)
    assert dict(copy.config) == dict(plain.config)
    assert not copy.training
    assert not made.module.training


def test_the_skeleton_answers_without_weights(saved: Any) -> None:
    cls, folders = saved
    plain = cls.from_pretrained(folders[torch.float32], torch_dtype=torch.bfloat16)
    module = weights.read_pretrained(folders[torch.float32], torch_dtype=torch.bfloat16).module
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    shapes = {name: (t.shape, t.dtype) for name, t in plain.state_dict().items()}
    assert {name: (t.shape, t.dtype) for name, t in module.state_dict().items()} == shapes
    assert module.dtype is plain.dtype
    assert module.num_parameters() == plain.num_parameters()
    own = {name: b for name, b in module.named_buffers() if name not in shapes}
    assert not any(buffer.is_meta for buffer in own.values())
    assert all(torch.equal(b, dict(plain.named_buffers())[name]) for name, b in own.items())


def test_a_subfolder_of_a_pipeline(tmp_path: Path) -> None:
    save(small(), tmp_path / "transformer")
    with pytest.raises(ConfigError, match=r"Give subfolder=, one of transformer\."):
        weights.read_pretrained(tmp_path, cls=Small)
    made = weights.read_pretrained(str(tmp_path), subfolder="transformer", cls=Small)
    assert made.module.config["_name_or_path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("config", "options", "kind", "says"),
    [
        ({}, {}, ConfigError, "does not name a diffusers class"),
        ({"_class_name": "Nobody"}, {}, ConfigError, "has no model 'Nobody'"),
        ({"_class_name": "logging"}, {}, ConfigError, "has no model 'logging'"),
        ({}, {"cls": nn.Linear}, ConfigError, "Linear' is no diffusers model"),
        ({"quantization_config": {"bits": 4}}, {}, UnsupportedError, "is quantised: .*from_loader"),
        ({"width": -3}, {"cls": Small}, WeightsError, "cannot be built .*from_loader"),
        ({}, {"cls": Small, "torch_dtype": "bfloat16"}, ConfigError, "torch_dtype must be"),
        ({}, {"cls": Small, "torch_dtype": torch.int8}, ConfigError, "torch_dtype must be"),
        ({}, {"cls": Small, "torch_dtype": torch.float8_e4m3fn}, UnsupportedError, "compute"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, config: Any, options: Any, kind: type[Exception], says: str
) -> None:
    save(small(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=says):
        weights.read_pretrained(tmp_path, **options)


def test_no_folder() -> None:
    with pytest.raises(ConfigError, match="must be downloaded first"):
        weights.read_pretrained("some/model")


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    save(small(), tmp_path)
    (tmp_path / "config.json").write_text('{"width": 9}')
    with pytest.raises(WeightsError, match=r"first\.weight must be .*\[9, 9\], and is .*\[8, 8\]"):
        weights.read_pretrained(tmp_path, cls=Small)
    (tmp_path / "config.json").write_text('{"depth": 3}')
    with pytest.raises(WeightsError, match=r"blocks\.2\.weight is not there"):
        weights.read_pretrained(tmp_path, cls=Small)


def test_what_is_not_used_is_told(tmp_path: Path) -> None:
    save(small(), tmp_path)
    (tmp_path / "config.json").write_text('{"depth": 1}')
    offered = weights.read_pretrained(tmp_path, cls=Small).offer
    assert offered.warnings == (
        f"2 tensors of {tmp_path} are not used by a Small (blocks.1.bias, ...)",
    )


# --- building without weights --------------------------------------------------------------------


def test_parameters_come_out_empty_and_buffers_do_not() -> None:
    with no_parameters():
        module = Zoo()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    assert module.tied.weight is module.linear.weight
    assert not module.frozen.requires_grad
    shapes = {name: (t.shape, t.dtype) for name, t in tensors_of(Zoo()).items()}
    assert {name: (t.shape, t.dtype) for name, t in tensors_of(module).items()} == shapes
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_parameter_that_is_given_twice_is_one() -> None:
    with no_parameters():
        shared = nn.Parameter(torch.ones(3))
        one, other = nn.Module(), nn.Module()
        one.weight = shared
        other.weight = shared
    assert one.weight is other.weight


def test_other_threads_get_whole_modules() -> None:
    made = []
    with no_parameters():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join(30)
    assert not made[0].weight.is_meta


def test_a_large_model_costs_no_memory() -> None:
    before = memory_kib("Rss")
    with no_parameters():
        module = nn.ModuleList(nn.Linear(1 << 14, 1 << 14) for _ in range(64))
    assert sum(parameter.nbytes for parameter in module.parameters()) > 64 << 30
    assert memory_kib("Rss") - before < 100 << 10


def test_a_skeleton_travels(tmp_path: Path) -> None:
    module = Zoo()
    copy = weights.unpack_skeleton(weights.pack_skeleton(module))
    state = module.state_dict()
    assert all(tensor.is_meta for tensor in copy.state_dict().values())
    assert copy.state_dict().keys() == state.keys()
    assert copy.tied.weight is copy.linear.weight
    assert torch.equal(copy.rope, module.rope)
    assert torch.equal(copy.table, module.table)
    assert [p.requires_grad for p in copy.parameters()] == [
        p.requires_grad for p in module.parameters()
    ]
    freed = weights.vacant(copy)
    freed.restore({name: tensor.clone() for name, tensor in state.items()})
    assert digest_of(copy) == digest_of(module)
    assert copy.tied.weight is copy.linear.weight


def test_a_checkpoint_can_hold_more_than_one_name_of_a_tied_weight(tmp_path: Path) -> None:
    module = small()
    save(module, tmp_path)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    made = weights.read_pretrained(tmp_path, cls=Small, torch_dtype=torch.bfloat16)
    with made.offer as offered:
        copy = weights.load(offered.ticket)
    assert copy.last.weight is copy.first.weight
    assert digest_of(copy) == digest_of(module)
