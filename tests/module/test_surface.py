"""Every inherited method is decided: local, mirrored or refused."""

from __future__ import annotations

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
from raymod.module.surface import LOCAL, MIRRORED, REFUSED
from tests import models
from tests.module.standin import Ranks, Report

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


def public_members(kind: type) -> Iterator[str]:
    for base in kind.__mro__[:-1]:
        for name, value in vars(base).items():
            if not name.startswith("_") and (callable(value) or _is_descriptor(value)):
                yield name


def _is_descriptor(value: Any) -> bool:
    return isinstance(value, (property, classmethod, staticmethod))


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_every_member_is_in_the_table(base: type) -> None:
    known = LOCAL | MIRRORED | REFUSED.keys()
    data = {"T_destination", "call_super_init", "dump_patches"}
    missing = set(public_members(base)) - known - data
    assert not missing, f"{base.__name__} has methods that raymod.module.surface does not know"


def test_the_table_has_no_method_twice() -> None:
    assert not LOCAL & MIRRORED
    assert not (LOCAL | MIRRORED) & REFUSED.keys()
    for name in MIRRORED:
        assert name in vars(RemoteModule) or name == "eval", name


@pytest.fixture(scope="module")
def stub() -> RemoteModule:
    module, _ = models.flux()
    return make_stub(module, Ranks(module), report=Report(), device=torch.device("cpu"))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_methods_say_what_to_do_instead(stub: RemoteModule, name: str) -> None:
    if not hasattr(diffusers.FluxTransformer2DModel, name):
        assert not hasattr(stub, name)
        return
    with pytest.raises(UnsupportedError, match=rf"FluxTransformer2DModel\.{name}\(\).*:"):
        getattr(stub, name)()
