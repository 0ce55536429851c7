"""Checkpoints by path: what is found in them, what does not fit, and where a module came from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raymod import weights
from raymod.errors import ConfigError, WeightsError
from raymod.weights.checkpoint import open_checkpoint
from raymod.weights.matching import origin
from tests.weights import ranks
from tests.weights.ranks import Rank, digest_of
from tests.weights.small import save, small

MODEL = "diffusion_pytorch_model.safetensors"


def linear(**options: Any) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 4, **options)


def saved(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def loaded(source: Any, module: nn.Module) -> nn.Module:
    with weights.offer(source, module) as offered:
        return weights.load(offered.ticket)


# --- what arrives --------------------------------------------------------------------------------


def test_the_checkpoints_values_win_and_nothing_of_them_is_sent(tmp_path: Path) -> None:
    torch.manual_seed(1)
    wide = nn.Linear(500, 500)
    values = {name: torch.randn_like(tensor) for name, tensor in wide.state_dict().items()}
    with weights.offer(saved(tmp_path, values), wide) as offered:
        assert offered.ticket.file.size < 10_000
        assert offered.ticket.needs == ()  # a path is an order: no rank falls back to pieces
        copy = weights.load(offered.ticket)
    assert all(torch.equal(copy.state_dict()[name], value) for name, value in values.items())


def test_what_the_checkpoint_lacks_is_sent_and_it_says_so(tmp_path: Path) -> None:
    module = linear()
    folder = saved(tmp_path, {"weight": torch.ones(4, 3), "other": torch.ones(1)})
    with weights.offer(folder, module) as offered:
        assert len(offered.warnings) == 1
        assert "1 weights of the Linear are not in" in offered.warnings[0]
        copy = weights.load(offered.ticket)
    assert torch.equal(copy.weight, torch.ones(4, 3))
    assert torch.equal(copy.bias, module.bias)


@pytest.mark.parametrize("there", [torch.float32, torch.float16, torch.float64])
def test_floating_dtypes_are_cast_as_torch_casts(tmp_path: Path, there: torch.dtype) -> None:
    values = {name: torch.randn(t.shape).to(there) for name, t in linear().state_dict().items()}
    copy = loaded(saved(tmp_path, values), linear(dtype=torch.bfloat16))
    for name, value in values.items():
        assert torch.equal(copy.state_dict()[name], value.bfloat16())


def test_a_cast_in_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymod.weights.offers._CHUNK_BYTES", 1000)
    value = torch.randn(7, 333)
    module = nn.Linear(333, 7, bias=False, dtype=torch.float16)
    assert torch.equal(loaded(saved(tmp_path, {"weight": value}), module).weight, value.half())


def test_tensors_that_other_software_left_unaligned(tmp_path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}})
    text = header.encode() + b" " * (-len(header) % 8 + 3)  # the data begins at an odd address
    value = torch.randn(4, 3)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + value.numpy().tobytes())
    assert torch.equal(loaded(path, linear(bias=False)).weight, value)


def test_shards_and_empty_tensors(tmp_path: Path) -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(0, 2)})
    state = module.state_dict()
    saved(tmp_path, {k: v for k, v in state.items() if k[0] == "a"}, "one.safetensors")
    saved(tmp_path, {k: v for k, v in state.items() if k[0] == "b"}, "two.safetensors")
    names = {key: "one.safetensors" if key[0] == "a" else "two.safetensors" for key in state}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    for source in (tmp_path, index):
        assert digest_of(loaded(source, module)) == digest_of(module)


# --- what does not fit, said on the driver -------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            {"weight": torch.ones(3, 4), "bias": torch.ones(4)},
            r"weight is float32\[4, 3\] in the module and float32\[3, 4\] in the checkpoint",
        ),
        (
            {"weight": torch.ones(4, 3, dtype=torch.int8), "bias": torch.ones(4)},
            r"weight is float32\[4, 3\] in the module and int8\[4, 3\] in the checkpoint",
        ),
        ({"proj.weight": torch.ones(4, 3)}, r"none of .* has weight, bias, .* has proj\.weight"),
        ({}, "none of the weights of the Linear is in .* the checkpoint has nothing"),
    ],
)
def test_a_checkpoint_of_something_else(tmp_path: Path, tensors: Any, says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        weights.offer(saved(tmp_path, tensors), linear())


def test_paths_with_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no safetensors file"):
        weights.offer(tmp_path, linear())
    saved(tmp_path / "transformer", {"weight": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"Its subfolders do: transformer\."):
        weights.offer(str(tmp_path), linear())
    with pytest.raises(ConfigError, match="is neither a folder with safetensors nor such a file"):
        weights.offer(tmp_path / "nowhere", linear())
    with pytest.raises(ConfigError, match=r"'some/model' is neither .*from_pretrained\('some/mo"):
        weights.offer("some/model", linear())


def test_several_checkpoints_in_one_folder(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        saved(tmp_path, linear().state_dict(), name)
    with pytest.raises(ConfigError, match=r"several checkpoints: a\.safetensors, b\.safetensors"):
        weights.offer(tmp_path, linear())
    saved(tmp_path, linear().state_dict(), MODEL)  # the usual name goes first
    assert open_checkpoint(tmp_path).tensors["weight"].file.path == str(tmp_path / MODEL)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"no safetensors file \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ((8).to_bytes(8, "little") + b"not json", "header is damaged"),
        (
            (77).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'.ljust(77),
            "16 bytes is said to stand at 0 to 16",
        ),
        (
            (60).to_bytes(8, "little")
            + b'{"a":{"dtype":"X9","shape":[],"data_offsets":[0,0]}}'.ljust(60),
            "dtype X9",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=says):
        weights.offer(path, linear())


def test_an_index_without_its_files(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"not the index of a complete checkpoint.*gone"):
        weights.offer(tmp_path, linear())
    saved(tmp_path, {"bias": torch.ones(4)}, "gone.safetensors")
    with pytest.raises(WeightsError, match=r"says that gone\.safetensors holds weight"):
        weights.offer(tmp_path, linear())


# --- on the ranks --------------------------------------------------------------------------------


def test_a_rank_without_the_file_names_it(two_ranks: tuple[Rank, Rank], tmp_path: Path) -> None:
    rank, _ = two_ranks
    with weights.offer(save(small(), tmp_path / "model"), small()) as offered:
        ticket = offered.ticket
        (tmp_path / "model").rename(tmp_path / "elsewhere")
        assert rank.do(weights.can_open, ticket)
        with pytest.raises(WeightsError, match=rf"{MODEL} cannot be read here: No such file"):
            rank.do(ranks.load, ticket)


def test_a_rank_with_another_file_refuses_it(two_ranks: tuple[Rank, Rank], tmp_path: Path) -> None:
    rank, _ = two_ranks
    folder = saved(tmp_path, linear().state_dict())
    with weights.offer(folder, linear()) as offered:
        saved(tmp_path, {**linear().state_dict(), "third": torch.ones(9)})
        with pytest.raises(WeightsError, match=r"model\.safetensors is another file here"):
            rank.do(ranks.load, offered.ticket)


# --- where a module came from --------------------------------------------------------------------


def test_the_folder_that_the_config_names(tmp_path: Path) -> None:
    module = small()
    module.register_to_config(_name_or_path=str(save(module, tmp_path)))
    assert origin(module).path == str(tmp_path)


def test_the_subfolder_that_fits(tmp_path: Path) -> None:
    module = small()
    save(module, tmp_path / "transformer")
    saved(tmp_path / "vae", {"first.weight": torch.ones(2)})
    module.register_to_config(_name_or_path=str(tmp_path))
    assert origin(module).path == str(tmp_path / "transformer")


def test_two_subfolders_that_fit(tmp_path: Path) -> None:
    module = small()
    for name in ("transformer", "transformer_2"):
        save(module, tmp_path / name)
    module.register_to_config(_name_or_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"may come from any of .*transformer, .*transformer_2"):
        origin(module)
    from safetensors.torch import load_file

    state = load_file(tmp_path / "transformer_2" / MODEL)  # mapped, which settles it
    module.load_state_dict(state, assign=True, strict=False)
    assert origin(module).path == str(tmp_path / "transformer_2" / MODEL)


def test_a_module_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the Linear was loaded from cannot be told \(it does"):
        weights.offer("checkpoint", linear())
    module = small()
    module.register_to_config(_name_or_path=str(save(module, tmp_path / "model")))
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ConfigError, match="where nothing fits"):
        origin(module)
