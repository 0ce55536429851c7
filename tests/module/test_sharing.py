"""One stub in several hands: pipelines, threads, copies, compilers, and what offloads."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import diffusers
import pytest
import torch
from accelerate.hooks import CpuOffload

from raymod.errors import UnsupportedError
from raymod.module import restore_local
from tests import models
from tests.module.families import FAMILIES, controlnet, run, stable_diffusion
from tests.module.sequences import flux
from tests.module.standin import stub_of
from tests.module.test_families import compare, twins
from tests.module.test_sequences import call


def test_a_second_pipeline_from_the_first_one_s_parts() -> None:
    plain, pipe, arguments = twins(FAMILIES["flux"])
    stub = pipe.transformer
    second = type(pipe)(**pipe.components)
    third = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    assert second.transformer is third.transformer is stub
    expected = run(plain, arguments)
    assert torch.equal(run(second, arguments), expected)
    assert torch.equal(run(pipe, arguments), expected)
    second.transformer.load_state_dict({"x_embedder.bias": torch.ones(64)}, strict=False)
    plain.transformer.load_state_dict({"x_embedder.bias": torch.ones(64)}, strict=False)
    assert torch.equal(run(pipe, arguments), run(plain, arguments))


def test_from_pipe_casts_both() -> None:
    """`from_pipe` casts to float32 unless told otherwise; the ranks follow."""
    _, pipe, _ = twins(FAMILIES["flux"])
    pipe.transformer.to(torch.float64)
    diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    assert {w.module.dtype for w in pipe.transformer.gang.workers} == {torch.float32}


def test_two_stubs_in_one_pipeline_have_gangs_of_their_own() -> None:  # R66
    plain, pipe, arguments = twins(FAMILIES["wan_of_two"])
    assert pipe.transformer.gang is not pipe.transformer_2.gang
    compare((plain, pipe, arguments))
    assert pipe.transformer.gang.calls
    assert pipe.transformer_2.gang.calls


def test_copies_are_refused_and_say_what_to_do() -> None:
    _, pipe, _ = twins(FAMILIES["flux"])
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match=r"raymod\.unwrap"):
            make(pipe.transformer)
    with pytest.raises(UnsupportedError, match=r"raymod\.unwrap"):
        copy.deepcopy(pipe)
    assert copy.copy(pipe).transformer is pipe.transformer  # a shallow copy shares the stub


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_compiling_a_stub_is_harmless_and_said() -> None:
    stub, ranks = stub_of(flux(), 2)
    with pytest.warns(UserWarning, match=r"torch\.compile of a raymod stub .* changes nothing"):
        compiled = torch.compile(stub, backend="inductor")
    expected = call(flux())
    for _ in range(3):
        assert torch.equal(call(compiled), expected)
    assert len(ranks.calls) == 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(stub)
    assert not [one for one in caught if "raymod" in str(one.message)]


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_code_around_a_stub_may_be_compiled() -> None:
    stub, _ = stub_of(torch.nn.Linear(3, 3), 1)
    inner = stub._raymod.original

    def step(x: torch.Tensor) -> torch.Tensor:
        return stub(x * 2).relu() + 1

    with torch.no_grad():
        x = torch.randn(2, 3)
        out = torch.compile(step, backend="eager")(x)
        assert torch.allclose(out, inner(x * 2).relu() + 1)


def test_threads_get_their_own_answers_and_ranks_see_one_order() -> None:
    stub, ranks = stub_of(flux(), 2)
    inputs = [models.flux()[1](1, seed=seed) for seed in range(6)]
    outputs: dict[int, torch.Tensor] = {}

    def one(number: int) -> None:
        mode = torch.inference_mode() if number % 2 else torch.no_grad()
        with mode:
            outputs[number] = stub(**inputs[number])[0]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    plain = flux()
    with torch.no_grad():
        for number, kwargs in enumerate(inputs):
            assert torch.equal(outputs[number], plain(**kwargs)[0])
    assert len(ranks.calls) == 6


OFFLOADS: dict[str, Any] = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
    "group": lambda pipe: pipe.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="leaf_level"
    ),
}


@pytest.mark.parametrize("kind", OFFLOADS)
def test_the_rest_of_a_pipeline_offloads(kind: str) -> None:  # R63
    """The device is the CPU here; that something is freed on an accelerator is not seen."""
    (plain, arguments), (pipe, _) = controlnet(), controlnet()
    original = pipe.unet
    pipe.unet, ranks = stub_of(original, 2)
    stub = pipe.unet
    before = {name: set(vars(part)) for name, part in original.named_modules()}
    OFFLOADS[kind](pipe)
    assert {name: set(vars(part)) for name, part in original.named_modules()} == before
    assert not any(parameter.is_meta for parameter in original.parameters())
    assert any(hasattr(p, "_hf_hook") or hasattr(p, "_diffusers_hook") for p in pipe.vae.modules())
    if kind == "sequential":  # accelerate's hooks cannot be run with this torch, plain or not
        return
    assert torch.equal(run(pipe, arguments), run(plain, arguments))
    stub.load_state_dict({"conv_out.bias": torch.ones(4)}, strict=False)
    plain.unet.load_state_dict({"conv_out.bias": torch.ones(4)}, strict=False)
    assert torch.equal(run(pipe, arguments), run(plain, arguments))
    assert len(ranks.calls) == 4
    assert restore_local(stub) is original
    assert {name: set(vars(part)) for name, part in original.named_modules()} == before


def test_hooks_from_before_stay_with_the_original() -> None:
    pipe, arguments = stable_diffusion()
    expected = run(pipe, arguments)
    pipe.enable_model_cpu_offload(device="cpu")
    original = pipe.unet
    hook, forward = original._hf_hook, original.__dict__["forward"]
    assert isinstance(hook, CpuOffload)
    stub, ranks = stub_of(original, 2)
    assert "_hf_hook" not in vars(stub)
    pipe.unet = stub
    assert torch.equal(run(pipe, arguments), expected)
    assert ranks.calls
    assert restore_local(stub)._hf_hook is hook
    assert original.__dict__["forward"] is forward


def test_loading_a_lora_leaves_offloading_alone() -> None:  # R64
    """The loaders take hooks off and put them on again; none of that reaches the stub's parts."""
    from tests.module.sequences import lora

    _, pipe, arguments = twins(FAMILIES["flux"])
    pipe.enable_model_cpu_offload(device="cpu")
    stub = pipe.transformer
    original = stub._raymod.original
    run(pipe, arguments)
    pipe.load_lora_weights(lora(flux(), 1), adapter_name="a")
    assert not any(hasattr(part, "_hf_hook") for part in original.modules())
    plain = flux()
    plain.load_lora_adapter(lora(flux(), 1), adapter_name="a")
    assert torch.equal(call(stub), call(plain))
