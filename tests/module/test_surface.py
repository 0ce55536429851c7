"""Every inherited method is decided: local, mirrored, helped with, ignored or refused."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import (
    FluxTransformer2DLoadersMixin,
    FromOriginalModelMixin,
    PeftAdapterMixin,
    UNet2DConditionLoadersMixin,
)
from diffusers.models.attention import AttentionMixin
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from raymod.errors import UnsupportedError
from raymod.module import RemoteModule, make_stub
from raymod.module.surface import HELPERS, IGNORED, LOCAL, MIRRORED, REFUSED
from tests import models
from tests.module.standin import Ranks

TABLES = (set(LOCAL), set(MIRRORED), set(HELPERS), set(IGNORED), set(REFUSED))

BASES = (
    nn.Module,
    ModelMixin,
    CacheMixin,
    AttentionMixin,
    PeftAdapterMixin,
    FromOriginalModelMixin,
    FluxTransformer2DLoadersMixin,
    UNet2DConditionLoadersMixin,
)
# What torch declares on the class and nobody calls.
DATA = {"T_destination", "call_super_init", "dump_patches"}
# What transformers gives to every module once it has made a model in this process.
GIVEN = {"smart_apply"}


def model_classes() -> list[type]:
    """Every model class of diffusers that a pipeline denoises with, or that helps it to."""
    found = set()
    for package in ("transformers", "unets", "controlnets"):
        base = importlib.import_module(f"diffusers.models.{package}")
        for info in pkgutil.walk_packages(base.__path__, f"{base.__name__}."):
            try:
                module = importlib.import_module(info.name)
            except ImportError:  # for another framework
                continue
            found.update(
                kind
                for kind in vars(module).values()
                if inspect.isclass(kind) and issubclass(kind, ModelMixin)
            )
    return sorted(found, key=lambda kind: kind.__name__)


def public_members(kind: type) -> Iterator[str]:
    for base in kind.__mro__[:-1]:
        for name, value in vars(base).items():
            if not name.startswith("_") and (callable(value) or _is_descriptor(value)):
                yield name


def _is_descriptor(value: Any) -> bool:
    return isinstance(value, (property, classmethod, staticmethod))


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_every_member_is_in_the_table(base: type) -> None:  # R52
    missing = set(public_members(base)) - set().union(*TABLES) - DATA
    assert not missing, f"{base.__name__} has methods that raymod.module.surface does not know"


def test_so_is_every_member_of_every_model_class() -> None:
    classes = model_classes()
    assert len(classes) > 90
    missing = {
        f"{kind.__name__}.{name}"
        for kind in classes
        for name in public_members(kind)
        if name not in set().union(*TABLES) | DATA
    }
    assert not missing, "raymod.module.surface does not know these"


def test_a_new_method_would_be_noticed() -> None:
    class Newer(diffusers.FluxTransformer2DModel):
        def enable_something_new(self) -> None: ...

    assert set(public_members(Newer)) - set().union(*TABLES) - DATA == {"enable_something_new"}


def test_the_table_has_no_method_twice_and_nothing_unknown() -> None:
    known = {name for kind in model_classes() for name in dir(kind)}
    assert len(set().union(*TABLES)) == sum(map(len, TABLES))
    assert set().union(*TABLES) - known <= GIVEN


@pytest.fixture(scope="module")
def stub() -> RemoteModule:
    module, _ = models.flux()
    return make_stub(module, Ranks(module), device=torch.device("cpu"))


def test_what_is_mirrored_is_not_inherited(stub: RemoteModule) -> None:
    """The stub's class, or what makes it, has its own version of each."""
    own = {**vars(RemoteModule), **vars(type(stub))}
    for name in [*MIRRORED, *IGNORED, *HELPERS]:
        assert name in own or name == "eval" or not hasattr(type(stub), name), name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_methods_say_what_to_do_instead(stub: RemoteModule, name: str) -> None:
    if not hasattr(diffusers.FluxTransformer2DModel, name):
        assert not hasattr(stub, name)
        return
    with pytest.raises(UnsupportedError, match=rf"FluxTransformer2DModel\.{name}\(\).*:"):
        getattr(stub, name)()
