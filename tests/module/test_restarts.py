"""A pipeline does not notice that its ranks died: what they had is given to new ones."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch

import raymod
from raymod.demo import load_pipeline, model_path
from tests import models
from tests.api.test_pipelines import TOLERANCE, difference, make
from tests.module.sequences import flux, lora
from tests.module.test_caching import denoise
from tests.module.test_sequences import call

pytestmark = pytest.mark.gang

PROMPTS = ["a handwritten seven", "a four"]


def kill(stub: Any, rank: int = 0) -> None:
    os.kill(stub.report.ranks[rank].pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _ray(ray_for_tests: Any) -> None:
    ray_for_tests.ensure()


@pytest.fixture
def wrapped() -> Iterator[Any]:
    config = raymod.GangConfig(max_restarts=9)
    with raymod.wrap(flux(), ulysses_degree=2, gang=config) as stub:
        yield stub


@pytest.mark.parametrize("weights", ["auto", "checkpoint"])
def test_in_the_middle_of_a_picture(weights: str) -> None:
    plain, pipe = load_pipeline(), load_pipeline()
    for each in (plain, pipe):
        each.set_progress_bar_config(disable=True)
    expected = make(plain, PROMPTS)
    raymod.wrap(pipe, ulysses_degree=2, weights=weights)
    stub = pipe.transformer
    seen = []

    def die(pipe: Any, step: int, *rest: Any) -> dict[str, Any]:
        seen.append(step)
        if step == 1:
            kill(stub, 1)
        return {}

    images = pipe(
        PROMPTS,
        height=32,
        width=32,
        max_sequence_length=16,
        num_inference_steps=3,
        generator=[torch.Generator().manual_seed(seed) for seed in range(2)],
        output_type="np",
        callback_on_step_end=die,
    ).images
    assert seen == [0, 1, 2]
    assert stub.gang.restarts.number == 1
    assert difference(images, expected) <= TOLERANCE
    raymod.unwrap(pipe)


def test_all_that_has_changed_is_there_again(wrapped: Any) -> None:
    """Adapters, dtypes, parts; and a second model on the same ranks."""
    plain, plain_second = flux(), models.flux(seed=5)[0].eval()
    second_module = copy.deepcopy(plain_second)
    with raymod.wrap(second_module, gang=wrapped) as second:
        for module in (plain, wrapped):
            module.load_lora_adapter(lora(flux(), 1), adapter_name="a")
            module.load_lora_adapter(lora(flux(), 2), adapter_name="b")
            module.set_adapters(["a", "b"], [0.5, 1.5])
            module.transformer_blocks[0].ff.net[2].weight.data = (
                2 * module.transformer_blocks[0].ff.net[2].weight.data
            )
        for module in (plain_second, second):
            module.load_lora_adapter(lora(flux(), 4), adapter_name="only here")
        assert difference(call(wrapped), call(plain)) <= TOLERANCE
        kill(wrapped)
        assert difference(call(wrapped), call(plain)) <= TOLERANCE
        assert difference(call(second), call(plain_second)) <= TOLERANCE
        for module in (plain, wrapped):
            module.delete_adapters("a")
        kill(wrapped)
        for module in (plain, wrapped):  # a change finds new ranks too
            module.set_adapters(["b"], [0.7])
        assert difference(call(second), call(plain_second)) <= TOLERANCE
        assert difference(call(wrapped), call(plain)) <= TOLERANCE
        assert wrapped.gang.restarts.number == 2
        assert second.health()[0].ok
        assert second.report.ranks == wrapped.report.ranks


def test_a_cache_s_lost_steps_are_said(wrapped: Any) -> None:
    plain = flux()
    for module in (plain, wrapped):
        module.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    expected = denoise(plain)
    assert difference(denoise(wrapped), expected) <= TOLERANCE
    kill(wrapped)
    with pytest.warns(UserWarning, match="started anew while a step cache was on"):
        wrapped._reset_stateful_cache()
    assert difference(denoise(wrapped), expected) <= TOLERANCE


def test_a_stub_that_has_failed_is_brought_back(wrapped: Any) -> None:
    plain = flux()
    wrapped.gang.fail(raymod.GangError("as a test wants it"))
    with pytest.raises(raymod.GangFailedError, match="as a test wants it"):
        call(wrapped)
    before = wrapped.report.ranks
    wrapped.restart()
    assert wrapped.report.ranks != before
    assert difference(call(wrapped), call(plain)) <= TOLERANCE
    wrapped.restart()  # also when nothing was wrong
    assert difference(call(wrapped), call(plain)) <= TOLERANCE


def test_a_checkpoint_is_read_again() -> None:
    plain = load_pipeline().transformer
    inputs = {
        "hidden_states": torch.randn(1, 16, plain.config.in_channels),
        "encoder_hidden_states": torch.randn(1, 5, plain.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, plain.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
        "return_dict": False,
    }
    if plain.config.guidance_embeds:
        inputs["guidance"] = torch.ones(1)
    with (
        torch.no_grad(),
        raymod.from_pretrained(model_path(), subfolder="transformer", workers=2) as stub,
    ):
        expected = plain(**inputs)[0]
        assert difference(stub(**inputs)[0], expected) <= TOLERANCE
        kill(stub, 1)
        assert difference(stub(**inputs)[0], expected) <= TOLERANCE
        assert stub.gang.restarts.number == 1
        assert difference(raymod.unwrap(stub)(**inputs)[0], expected) <= TOLERANCE
