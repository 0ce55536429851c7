"""What the installed pipelines ask of their denoisers, read from their source."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest
import torch

from raymod.module import RemoteModule
from raymod.module.surface import HELPERS, IGNORED, LOCAL, MIRRORED, REFUSED
from tests import models
from tests.module.standin import stub_of
from tests.module.test_surface import model_classes

ROOT = Path(diffusers.__file__).parent
FOLDERS = ("pipelines", "loaders", "modular_pipelines")
DENOISERS = {"transformer", "transformer_2", "unet", "controlnet", "prior", "denoiser"}
DECIDED = {*HELPERS, *IGNORED, *LOCAL, *MIRRORED, *REFUSED}

# Private names that pipelines set. The loaders remember what they replaced, on the driver; the
# configuration goes to the ranks.
SET_HERE = {"_transformer_norm_layers", "_overwritten_params"}
SET_EVERYWHERE = {"_internal_dict"}
# What every object has, and what torch.compile and MultiControlNetModel have instead of a model.
NOT_OF_A_MODEL = {"__class__", "_orig_mod", "nets", "model"}


def uses() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Names that are read from, and set on, a denoiser, and the files that do so."""
    read: dict[str, set[str]] = defaultdict(set)
    stored: dict[str, set[str]] = defaultdict(set)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name.startswith("convert_") or "onnx" in path.name:
                continue  # not run on a model of ours
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and _ends_in_a_denoiser(node.value):
                    is_store = isinstance(node.ctx, ast.Store)
                    (stored if is_store else read)[node.attr].add(path.name)
    return read, stored


def _ends_in_a_denoiser(node: ast.expr) -> bool:
    """`transformer`, `self.transformer`, `components.transformer`."""
    if isinstance(node, ast.Attribute):
        return node.attr in DENOISERS and isinstance(node.value, ast.Name)
    return isinstance(node, ast.Name) and node.id in DENOISERS


READ, STORED = uses()


def members() -> dict[str, set[str]]:
    """Methods and properties of all model classes, with the classes that have them."""
    found: dict[str, set[str]] = defaultdict(set)
    for kind in model_classes():
        for name in dir(kind):
            value = inspect.getattr_static(kind, name)
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                found[name].add(kind.__name__)
    return found


MEMBERS = members()


def undecided(read: dict[str, set[str]]) -> dict[str, set[str]]:
    """Methods among the names that no table knows; the rest are attributes and parts."""
    names = set(read) & set(MEMBERS) - DECIDED - NOT_OF_A_MODEL
    # private ones that only read: the class's own code does with them what it likes
    return {name: read[name] for name in names if name not in ONLY_READ}


ONLY_READ = {"_load_ip_adapter_loras"}


def test_the_source_is_read() -> None:
    assert len(READ) > 50
    assert len(READ["cache_context"]) > 30
    assert {"encoder_hid_proj", "rope", "audio_rope", "attn_processors"} <= set(READ)


def test_every_method_that_a_pipeline_calls_is_decided() -> None:
    assert undecided(READ) == {}


def test_a_new_one_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMBERS, "_set_something", {"SomeTransformer"})
    assert undecided({**READ, "_set_something": {"x.py"}}) == {"_set_something": {"x.py"}}


def test_every_private_name_that_a_pipeline_sets_is_decided() -> None:
    private = {name for name in STORED if name.startswith("_")}
    assert private == SET_HERE | SET_EVERYWHERE


def test_what_is_set_goes_where_it_must() -> None:
    stub, ranks = stub_of(models.flux()[0], 2)
    for name in SET_HERE:
        setattr(stub, name, {"a": 1})
        assert getattr(stub, name) == {"a": 1}
        assert not any(hasattr(worker.module, name) for worker in ranks.workers)
    for name in SET_EVERYWHERE | {name for name in STORED if not name.startswith("_")}:
        value = type(stub.config)({**stub.config, "noted": 1}) if name[0] == "_" else 5
        if isinstance(inspect.getattr_static(type(stub), name, None), property):
            continue
        if isinstance(stub.__dict__.get("_modules", {}).get(name), torch.nn.Module):
            continue
        setattr(stub, name, value)
        assert all(getattr(worker.module, name) == value for worker in ranks.workers)


@pytest.mark.parametrize(
    ("family", "part", "method"),
    [("ltx2", "rope", "prepare_video_coords"), ("ltx2", "audio_rope", "prepare_audio_coords")],
)
def test_helpers_of_parts_answer_here(family: str, part: str, method: str) -> None:
    """Coordinates depend on no weight, so they are the same with the weights freed."""
    del family
    from raymod.weights import free
    from tests.module.families import made

    module = made(
        "LTX2VideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=1,
        caption_channels=16,
    )
    call = {
        "prepare_video_coords": (1, 2, 3, 4, torch.device("cpu")),
        "prepare_audio_coords": (1, 6, torch.device("cpu")),
    }[method]
    expected = getattr(getattr(module, part), method)(*call)
    stub, ranks = stub_of(module, freed=free(module))
    assert torch.equal(getattr(getattr(stub, part), method)(*call), expected)
    assert ranks.sent_bytes == 0


def test_attributes_are_answered_by_the_driver_s_module() -> None:
    stub, ranks = stub_of(models.flux()[0])
    for name in ("inner_dim", "out_channels", "config", "dtype"):
        assert getattr(stub, name) == getattr(stub._raymod.original, name)
    with pytest.raises(AttributeError, match=r"FluxTransformer2DModel.*nothing_like_it"):
        _ = stub.nothing_like_it
    assert ranks.sent_bytes == 0


def mirrored_names() -> Iterator[str]:
    """Those that pipelines call and that change the model."""
    yield from (name for name in READ if name in MIRRORED and name in MEMBERS)


@pytest.mark.parametrize("name", sorted(mirrored_names()))
def test_what_changes_the_model_is_not_the_original_s_own(name: str) -> None:
    for kind in model_classes():
        if name not in dir(kind) or inspect.isabstract(kind):
            continue
        from raymod.module.methods import stub_class

        made = inspect.getattr_static(stub_class(kind, RemoteModule), name)
        assert made is not inspect.getattr_static(kind, name), f"{kind.__name__}.{name}"
