"""The stub passes for the module and never changes the local side alone."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from raymod.errors import ConfigError, PackError, StubClosedError, UnsupportedError, WeightsError
from raymod.module import RemoteModule, make_stub, restore_local
from raymod.weights import free
from tests import models
from tests.module.standin import Ranks, stub_of


@pytest.fixture
def flux() -> Any:
    module, make_inputs = models.flux()
    return module.eval(), make_inputs


def test_it_is_an_instance_of_the_originals_class(flux: Any) -> None:
    module, _ = flux
    before = dict(vars(module))
    stub, _ = stub_of(module)
    assert isinstance(stub, type(module))
    assert isinstance(stub, RemoteModule)
    assert type(stub).__name__ == type(module).__name__
    assert type(stub).__module__ == type(module).__module__
    assert inspect.signature(stub.forward) == inspect.signature(module.forward)
    assert stub.config == module.config
    assert stub.dtype == module.dtype
    assert stub.num_parameters() == module.num_parameters()
    assert vars(module) == before


def test_the_call_reaches_the_ranks_positional_and_keyword(flux: Any) -> None:  # R54
    module, make_inputs = flux
    stub, ranks = stub_of(module)
    inputs = make_inputs(2, return_dict=True)
    with torch.no_grad():
        local = module(**inputs)
        remote = stub(**inputs)
        latents = inputs.pop("hidden_states")
        positional = stub(latents, **inputs)
    assert type(remote) is type(local)
    assert torch.equal(remote.sample, local.sample)
    assert torch.equal(positional.sample, local.sample)
    assert len(ranks.calls) == 2
    assert ranks.calls[1][0][0] is latents


def test_an_attribute_that_neither_side_has_is_told_of_the_stub(flux: Any) -> None:  # R50
    stub, _ = stub_of(flux[0])
    with pytest.raises(AttributeError) as caught:
        _ = stub.vae_scale
    text = str(caught.value)
    assert text.startswith("RemoteModule(FluxTransformer2DModel), a raymod stub, has no attribute")
    assert "'vae_scale': it does not exist on the module that runs on the ranks" in text
    assert caught.value.name == "vae_scale"
    assert getattr(stub, "vae_scale", 3) == 3


def test_what_was_set_on_the_instance_leads_no_call_past_the_ranks() -> None:
    module = nn.Linear(3, 3)
    module.compile(backend="eager")
    module.forward = lambda x: x * 0  # as offload hooks do
    module.to = lambda *args, **kwargs: module
    before = dict(vars(module))
    stub = make_stub(module, Ranks(nn.Linear(3, 3)), device=torch.device("cpu"))
    with torch.no_grad():
        assert stub(torch.ones(1, 3)).abs().sum() > 0
    assert len(stub.gang.calls) == 1
    assert stub.to(torch.float64) is stub
    assert stub.gang.module.weight.dtype == torch.float64
    assert vars(module).keys() == before.keys()


def test_inputs_that_want_gradients_are_refused(flux: Any) -> None:  # R95
    module, make_inputs = flux
    stub, ranks = stub_of(module)
    inputs = make_inputs(1)
    inputs["hidden_states"].requires_grad_()
    with pytest.raises(UnsupportedError, match="no_grad"):
        stub(**inputs)
    assert not ranks.calls
    with torch.no_grad():
        stub(**inputs)
    assert len(ranks.calls) == 1


def test_a_list_that_holds_itself_is_refused(flux: Any) -> None:
    module, make_inputs = flux
    stub, ranks = stub_of(module)
    endless: list[Any] = []
    endless.append(endless)
    with torch.no_grad(), pytest.raises(PackError, match="a container that holds itself"):
        stub(**make_inputs(1), controls=endless)
    assert not ranks.calls


def test_to_a_device_moves_nothing_and_is_remembered(flux: Any) -> None:
    module, _ = flux
    stub, _ = stub_of(module)
    assert stub.device == torch.device("cpu")
    for ask, device in (
        (lambda: stub.to("cuda"), torch.device("cuda")),
        (lambda: stub.cuda(), torch.device("cuda", 0)),
        (lambda: stub.cuda(1), torch.device("cuda", 1)),
        (lambda: stub.to(torch.zeros(1)), torch.device("cpu")),
        (lambda: stub.xpu(), torch.device("xpu", 0)),
        (lambda: stub.cpu(), torch.device("cpu")),
    ):
        assert ask() is stub
        assert stub.device == device
        assert next(stub.parameters()).device.type == "cpu"
    with pytest.raises(ConfigError, match="meta"):
        stub.to("meta")


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.to("cpu", torch.float16), torch.float16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to(dtype=torch.float64).float(), torch.float32),
    ],
)
def test_to_a_dtype_changes_both_sides(flux: Any, cast: Any, dtype: torch.dtype) -> None:  # R62
    module, _ = flux
    stub, ranks = stub_of(module)
    parameter = module.proj_out.weight
    assert cast(stub) is stub
    assert stub.dtype == module.dtype == dtype
    assert ranks.module.proj_out.weight.dtype == dtype
    assert module.proj_out.weight is parameter
    assert ranks.forgotten >= 1  # what was checked was another precision


def test_train_and_eval_are_mirrored(flux: Any) -> None:
    module, _ = flux
    stub, ranks = stub_of(module)
    assert stub.train() is stub
    assert stub.training
    assert ranks.module.training
    assert all(part.training for part in module.modules())
    stub.eval()
    assert [stub.training, ranks.module.training, module.training] == [False] * 3


def test_attributes_are_set_on_every_rank(flux: Any) -> None:
    module, _ = flux
    stub, ranks = stub_of(module)
    stub.out_channels = 7
    assert ranks.module.out_channels == stub.out_channels == 7
    with pytest.raises(UnsupportedError, match="scale"):
        stub.scale = torch.ones(1)
    with pytest.raises(UnsupportedError, match="proj_out"):
        del stub.proj_out


def test_copies_and_pickles_are_refused_with_the_way_out(flux: Any) -> None:  # R53
    module, _ = flux
    stub, _ = stub_of(module)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match=r"raymod\.unwrap"):
            make(stub)


def test_closed_says_so(flux: Any) -> None:
    module, make_inputs = flux
    stub, ranks = stub_of(module)
    with stub as entered:
        assert entered is stub
        assert not stub.closed
    stub.close()
    assert stub.closed
    assert ranks.closes == 2
    for use in (
        lambda: stub(**make_inputs(1)),
        lambda: stub.to(torch.float16),
        lambda: stub.train(),
        lambda: setattr(stub, "out_channels", 3),
    ):
        with pytest.raises(StubClosedError, match="closed"), torch.no_grad():
            use()
    assert "closed" in repr(stub)
    assert restore_local(stub) is module


def test_repr_is_one_line(flux: Any) -> None:
    stub, _ = stub_of(flux[0])
    assert repr(stub) == "RemoteModule(FluxTransformer2DModel, 2 ranks: ulysses_degree=2)"


def test_save_pretrained_writes_the_original(flux: Any, tmp_path: Any) -> None:
    module, make_inputs = flux
    stub, _ = stub_of(module)
    stub.save_pretrained(tmp_path)
    again = type(module).from_pretrained(tmp_path)
    inputs = make_inputs(1)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], module(**inputs)[0])


def test_freed_weights_come_back_into_the_same_parameters(flux: Any, tmp_path: Any) -> None:
    module, make_inputs = flux
    inputs = make_inputs(1)
    with torch.no_grad():
        expected = module(**inputs)[0]
    parameters = dict(module.named_parameters())
    ranks = Ranks(module)
    stub = make_stub(module, ranks, device=torch.device("cpu"), freed=free(module))
    assert all(parameter.is_meta for parameter in stub.parameters())
    assert stub.num_parameters() == sum(p.numel() for p in ranks.module.parameters())
    stub.save_pretrained(tmp_path)
    saved = type(module).from_pretrained(tmp_path)
    stub.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        assert torch.equal(saved(**inputs)[0], expected)
    assert restore_local(stub) is module
    assert all(dict(module.named_parameters())[name] is p for name, p in parameters.items())
    with torch.no_grad():
        assert torch.equal(module(**inputs)[0], expected)


def test_freed_weights_of_a_closed_stub_are_lost_and_it_says_so(flux: Any) -> None:
    module, _ = flux
    stub, _ = stub_of(module, freed=free(module))
    stub.close()
    with pytest.raises(WeightsError, match="keep_local=False"):
        restore_local(stub)


def test_a_plain_module_too() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    stub, _ = stub_of(module)
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert torch.equal(stub(x), module(x))
    assert isinstance(stub, nn.Sequential)
    assert len(stub) == 2
    assert stub.state_dict().keys() == module.state_dict().keys()


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().float()]
)
def test_a_dtype_is_that_of_the_plain_model_weight_by_weight(cast: Any) -> None:
    """Also where a class keeps some of its modules in fp32: the ranks use its own method."""
    plain, module = models.wan()[0], models.wan()[0]
    assert type(module)._keep_in_fp32_modules
    for each in (plain, module):  # as `from_pretrained` leaves them
        for name, parameter in each.named_parameters():
            if not any(kept in name for kept in type(each)._keep_in_fp32_modules):
                parameter.data = parameter.data.bfloat16()
    stub, ranks = stub_of(module, count=2)
    assert len({parameter.dtype for parameter in stub.parameters()}) == 2
    cast(plain)
    cast(stub)
    expected = {name: value.dtype for name, value in plain.state_dict().items()}
    for side in (stub, *(worker.module for worker in ranks.workers)):
        assert {name: value.dtype for name, value in side.state_dict().items()} == expected


def test_parameters_are_those_of_the_driver_s_module_and_are_never_none(flux: Any) -> None:  # R51
    module, _ = flux
    stub, ranks = stub_of(module)
    assert next(stub.parameters()) is next(module.parameters())
    assert [name for name, _ in stub.named_parameters()] == [
        name for name, _ in module.named_parameters()
    ]
    before = ranks.sent_bytes
    freed, _ = stub_of(module, ranks=ranks, freed=free(module))
    first = next(freed.parameters())
    assert (first.dtype, first.is_meta) == (torch.float32, True)
    for ask in (
        repr,
        lambda m: (m.dtype, m.device, m.config, m.num_parameters(), list(m.buffers())),
    ):
        ask(freed)
    assert ranks.sent_bytes == before  # nothing of it fetches weights
