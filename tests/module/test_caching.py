"""Step caches through a stub, on real ranks: the same steps are skipped as locally."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch

import raymod
from tests import models
from tests.api.test_pipelines import difference
from tests.module.sequences import flux

pytestmark = pytest.mark.gang

TOLERANCE = 1e-5
STEPS = 6
FIRST_BLOCK = {"threshold": 0.2}


@pytest.fixture(scope="module")
def wrapped(ray_for_tests: Any) -> Iterator[Any]:
    ray_for_tests.ensure()
    with raymod.wrap(flux(), ulysses_degree=2) as stub:
        yield stub


def denoise(module: Any, *, start: int = 0, image: tuple[int, int] = (4, 4)) -> torch.Tensor:
    """Six steps with and without the prompt, each in its own context; all outputs."""
    outputs = []
    for step in range(start, STEPS):
        for seed, name in enumerate(("cond", "uncond")):
            call = models.flux()[1](1, seed=seed + 1, image=image)
            call["hidden_states"] = call["hidden_states"] * (1 + 0.02 * step)
            with module.cache_context(name), torch.no_grad():
                outputs.append(module(**call)[0])
    return torch.stack(outputs)


def watch(worker: Any) -> None:
    """Note each time that the attention of a block but the first runs, on a rank."""
    seen: list[int] = []
    worker.module.__dict__["seen"] = seen
    part = worker.module.single_transformer_blocks[0].attn.to_q
    worker.module.__dict__["watching"] = part.register_forward_pre_hook(lambda *_: seen.append(1))


def watched(worker: Any) -> int:
    worker.module.__dict__.pop("watching").remove()
    return len(worker.module.__dict__.pop("seen"))


def test_a_cache_is_put_on_and_taken_off(wrapped: Any) -> None:
    """R100, R101: the state of each context is its own; the second time is an error, as locally."""
    plain = flux()
    exact = denoise(plain)
    assert difference(denoise(wrapped), exact) <= TOLERANCE
    for module in (plain, wrapped):
        assert not module.is_cache_enabled
        module.enable_cache(diffusers.FirstBlockCacheConfig(**FIRST_BLOCK))
        assert module.is_cache_enabled
        with pytest.raises(ValueError, match=r"enabled already|already been enabled"):
            module.enable_cache(diffusers.FirstBlockCacheConfig(**FIRST_BLOCK))
    wrapped.gang.call_all(watch)
    cached = denoise(plain)
    assert difference(cached, exact) > 1e-3  # some steps were skipped
    assert difference(denoise(wrapped), cached) <= TOLERANCE
    counts = wrapped.gang.call_all(watched)
    assert counts[0] == counts[1] < 2 * STEPS
    for module in (plain, wrapped):
        module.disable_cache()
        assert not module.is_cache_enabled
    assert difference(denoise(wrapped), exact) <= TOLERANCE


def test_what_is_left_of_a_run_is_forgotten(wrapped: Any) -> None:
    """R103: by a pipeline after each run; other sizes and an error in between change nothing."""
    plain = flux()
    for module in (plain, wrapped):
        module.enable_cache(diffusers.FirstBlockCacheConfig(**FIRST_BLOCK))
    first = denoise(plain)
    assert difference(denoise(wrapped), first) <= TOLERANCE
    for module in (plain, wrapped):
        module._reset_stateful_cache()
    assert difference(denoise(wrapped, image=(4, 6)), denoise(plain, image=(4, 6))) <= TOLERANCE
    for module in (plain, wrapped):
        module._reset_stateful_cache()
        with (
            pytest.raises(RuntimeError),
            module.cache_context("cond"),
            torch.no_grad(),
        ):
            module(**{**models.flux()[1](1), "encoder_hidden_states": torch.ones(1, 11, 3)})
        module._reset_stateful_cache()
    assert difference(denoise(plain), first) == 0
    assert difference(denoise(wrapped), first) <= TOLERANCE
    for module in (plain, wrapped):
        module.disable_cache()


def test_a_function_of_the_driver_decides(wrapped: Any) -> None:
    """R102: the timestep that it gives travels with each call."""
    plain = flux()
    now = [0]
    exact = denoise(plain)
    results = []
    for module in (plain, wrapped):
        module.enable_cache(
            diffusers.PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2,
                spatial_attention_timestep_skip_range=(100, 800),
                current_timestep_callback=lambda: now[0],
            )
        )
        outputs = []
        for step in range(STEPS):
            now[0] = 900 - 150 * step
            call = models.flux()[1](1, seed=1, image=(4, 4))
            call["hidden_states"] = call["hidden_states"] * (1 + 0.02 * step)
            with module.cache_context("cond"), torch.no_grad():
                outputs.append(module(**call)[0])
        results.append(torch.stack(outputs))
        module.disable_cache()
    assert difference(results[0], exact[::2]) > 1e-4
    assert difference(*results) <= TOLERANCE


def test_an_adapter_may_come_between_compiled_calls(wrapped: Any) -> None:
    """R106: on ranks that compile, a LoRA counts from the next call on."""
    from tests.module.sequences import lora
    from tests.module.test_sequences import call

    plain = flux()
    prepare = raymod.PrepareConfig(compile={"backend": "eager"})
    with raymod.wrap(flux(), gang=wrapped, prepare=prepare) as stub:
        before = call(plain)
        assert difference(call(stub), before) <= TOLERANCE
        for scale in (1.0, 0.3):
            for module in (plain, stub):
                if scale == 1.0:
                    module.load_lora_adapter(lora(flux(), 4), adapter_name="a")
                module.set_adapters("a", scale)
            assert difference(call(plain), before) > 1e-3
            assert difference(call(stub), call(plain)) <= TOLERANCE
        for module in (plain, stub):
            module.unload_lora()
        assert difference(call(stub), before) <= TOLERANCE
