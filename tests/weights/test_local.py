"""free and restore: the driver's own weights."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from raymod.errors import UnsupportedError, WeightsError
from raymod.weights import free
from tests.weights.ranks import digest_of
from tests.weights.test_offer import Zoo


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_the_very_same_parameters_come_back() -> None:
    module, x = Zoo(), torch.randn(2, 7)
    values, before, out = values_of(module), digest_of(module), module(x)
    parameters, steps = dict(module.named_parameters()), module.steps
    freed = free(module)
    freed.restore(values)
    assert all(parameters[name] is p for name, p in module.named_parameters())
    assert module.steps is steps
    assert module.tied.weight is module.linear.weight
    assert digest_of(module) == before
    assert torch.equal(module(x), out)


def test_meanwhile_shapes_and_dtypes_still_answer() -> None:
    module = Zoo()
    count = sum(p.numel() for p in module.parameters())
    shapes = {name: (t.shape, t.dtype) for name, t in module.state_dict().items()}
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    free(module)
    assert sum(p.numel() for p in module.parameters()) == count  # tied weights count once
    assert {name: (t.shape, t.dtype) for name, t in module.state_dict().items()} == shapes
    assert [name for name, p in module.named_parameters() if p.requires_grad] == names
    assert all(p.is_meta and isinstance(p, nn.Parameter) for p in module.parameters())
    assert not module.rope.is_meta  # in no checkpoint, and read by helpers on the driver


def test_the_memory_is_really_let_go() -> None:
    module = nn.Linear(10, 10)
    storage = weakref.ref(module.weight.untyped_storage())
    parameter = module.weight
    freed = free(module)
    assert storage() is None
    assert parameter.untyped_storage().nbytes() == 0
    del freed


def test_weights_may_come_back_in_another_dtype() -> None:
    module = nn.Linear(3, 3)
    values = values_of(module)
    free(module).restore({name: value.bfloat16() for name, value in values.items()})
    assert module.weight.dtype is torch.bfloat16
    assert torch.equal(module.weight, values["weight"].bfloat16())


def test_what_does_not_fit_changes_nothing() -> None:
    module = nn.Linear(3, 3)
    values = values_of(module)
    freed = free(module)
    with pytest.raises(WeightsError, match="bias did not come back"):
        freed.restore({"weight": values["weight"]})
    with pytest.raises(WeightsError, match=r"bias came back as \(4,\), not \(3,\)"):
        freed.restore({**values, "bias": torch.zeros(4)})
    assert module.weight.is_meta
    freed.restore({**values, "extra": torch.zeros(1)})
    assert torch.equal(module.bias, values["bias"])


def test_inference_parameters_can_be_freed_too() -> None:
    with torch.inference_mode():
        module = nn.Linear(3, 3)
    values = {name: t.clone() for name, t in module.state_dict().items()}
    free(module).restore(values)
    assert torch.equal(module.weight, values["weight"])


def test_tensor_subclasses_are_refused() -> None:
    class Quantised(torch.Tensor):
        pass

    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(torch.zeros(3, 3).as_subclass(Quantised), requires_grad=False)
    with pytest.raises(UnsupportedError, match="weight is a Quantised"):
        free(module)
    assert not module.bias.is_meta
