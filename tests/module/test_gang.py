"""On real ranks: after adapters and random changes, a pipeline does what the plain one does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raymod
from raymod.demo import load_pipeline
from tests import models
from tests.api.test_pipelines import difference, make
from tests.module.sequences import Sequence, flux, lora
from tests.module.test_adapters import image_adapter
from tests.module.test_sequences import call

pytestmark = pytest.mark.gang

TOLERANCE = 1e-5
PROMPT = ["a handwritten seven"]


@pytest.fixture(scope="module")
def wrapped(ray_for_tests: Any) -> Iterator[Any]:
    ray_for_tests.ensure()
    module = flux()
    with raymod.wrap(module, ulysses_degree=2) as stub:
        yield stub


def test_any_sequence_of_changes(wrapped: Any) -> None:
    plain = flux()
    done = []
    for name, change in Sequence(11, flux).steps(30):
        done.append(name)
        change(plain)
        change(wrapped)
        assert difference(call(plain, 0.6), call(wrapped, 0.6)) <= TOLERANCE, done
    counts = wrapped.gang.call_all(parameters)
    assert counts[0] == counts[1]


def parameters(worker: Any) -> list[str]:
    return [name for name, _ in worker.module.named_parameters()]


def fails_on_rank_1(module: Any) -> None:
    module.x_embedder.weight.data = module.x_embedder.weight.data * 2
    module.noted = "changed"
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == 1:
        raise ValueError("not on rank 1")


def test_a_change_that_fails_on_one_rank_costs_nothing(wrapped: Any) -> None:
    before = call(wrapped)
    with pytest.raises(ValueError, match="not on rank 1"):
        wrapped._change("try", fails_on_rank_1)
    assert wrapped.gang.call_all(noted) == [False, False]
    assert torch.equal(call(wrapped), before)


def noted(worker: Any) -> bool:
    return getattr(worker.module, "noted", None) == "changed"


def test_a_cache_context_reaches_every_rank(wrapped: Any) -> None:
    wrapped.gang.call_all(watch_contexts)
    with wrapped.cache_context("cond", step_index=2), wrapped.cache_context("inner"):
        call(wrapped)
    expected = [("cond", {"step_index": 2}), ("inner", {})]
    assert wrapped.gang.call_all(watched_contexts) == [expected] * 2


def watch_contexts(worker: Any) -> None:
    module, enter = worker.module, type(worker.module).cache_context
    module.__dict__["seen"] = []

    def cache_context(name: str, **fields: Any) -> Any:
        module.__dict__["seen"].append((name, fields))
        return enter(module, name, **fields)

    module.__dict__["cache_context"] = cache_context


def watched_contexts(worker: Any) -> Any:
    del worker.module.__dict__["cache_context"]
    return worker.module.__dict__.pop("seen")


def test_a_second_module_on_the_same_ranks(wrapped: Any) -> None:
    first = call(wrapped)
    plain = models.flux(seed=5)[0].eval()
    other = copy.deepcopy(plain)
    with pytest.raises(raymod.ConfigError, match="the gang to share has 2"):
        raymod.wrap(other, workers=3, gang=wrapped)
    with raymod.wrap(other, gang=wrapped) as second:
        assert second.report.ranks == wrapped.report.ranks
        assert "by sequence over 2" in second.report.split
        assert difference(call(plain), call(second)) <= TOLERANCE
        assert torch.equal(call(wrapped), first)
        for module in (plain, second):
            module.load_lora_adapter(lora(flux(), 4), adapter_name="only here")
        assert difference(call(plain), call(second)) <= TOLERANCE
        assert torch.equal(call(wrapped), first)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            local, remote = call(plain), call(second)
        assert local.dtype is remote.dtype is torch.bfloat16
        assert difference(local.float(), remote.float()) <= 2e-2
        assert difference(call(plain), call(second)) <= TOLERANCE
        assert "only here" not in getattr(wrapped, "peft_config", {})
        assert second.gang.call_all(parameters) != wrapped.gang.call_all(parameters)
        assert second.last_call.compute_s > 0
        with pytest.raises(ValueError, match="not on rank 1"):
            second._change("try", fails_on_rank_1)
        assert difference(call(plain), call(second)) <= TOLERANCE
    with pytest.raises(raymod.StubClosedError, match="was closed"):
        call(second)
    assert torch.equal(call(wrapped), first)


def test_an_adapter_over_quantized_weights(wrapped: Any) -> None:
    """The ranks' weights are quantized, the driver's are not; a LoRA goes on either."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    plain, module = flux(), flux()
    exact = call(plain)
    quantize_(plain, Int8WeightOnlyConfig())
    prepare = raymod.PrepareConfig(quantize=Int8WeightOnlyConfig())
    with raymod.wrap(module, gang=wrapped, prepare=prepare) as stub:
        assert difference(call(plain), call(stub)) <= TOLERANCE
        assert difference(call(plain), exact) > 1e-3
        for side in (plain, stub):
            side.load_lora_adapter(lora(flux(), 4), adapter_name="a")
        assert difference(call(plain), call(stub)) <= TOLERANCE
        with pytest.raises(ValueError, match="re-quantize"):
            stub.fuse_lora()  # as locally
        assert difference(call(plain), call(stub)) <= TOLERANCE
        with pytest.raises(raymod.WeightsError, match="the ranks hold quantized weights"):
            stub._raymod.sides.fetch()
        stub.unload_lora()
        assert difference(call(raymod.unwrap(stub)), exact) == 0


@pytest.fixture(scope="module")
def pipes(ray_for_tests: Any) -> Iterator[Any]:
    ray_for_tests.ensure()
    plain, pipe = load_pipeline(), load_pipeline()
    for each in (plain, pipe):
        each.set_progress_bar_config(disable=True)
    with raymod.wrap(pipe, workers=2):
        yield plain, pipe


class TestPipeline:
    """One wrapped pipeline and its plain twin, changed alike from test to test."""

    def both(self, pipes: Any, change: Any, **kwargs: Any) -> Any:
        for pipe in pipes:
            change(pipe)
        plain, wrapped = (make(pipe, PROMPT, steps=2, **kwargs) for pipe in pipes)
        assert difference(plain, wrapped) <= TOLERANCE
        return plain

    def test_adapters(self, pipes: Any) -> None:
        transformer = load_pipeline().transformer
        one, other = lora(transformer, 1), lora(transformer, 2)
        swapped = lora(transformer, 3)
        seen = [self.both(pipes, lambda pipe: None)]
        for change in (
            lambda pipe: pipe.load_lora_weights(dict(one), adapter_name="a"),
            lambda pipe: pipe.load_lora_weights(dict(other), adapter_name="b"),
            lambda pipe: pipe.set_adapters(["a", "b"], [0.4, 0.6]),
            lambda pipe: pipe.set_adapters("b", 0.5),
            lambda pipe: pipe.fuse_lora(lora_scale=0.5),
            lambda pipe: pipe.unfuse_lora(),
            lambda pipe: pipe.load_lora_weights(dict(swapped), adapter_name="b", hotswap=True),
            lambda pipe: pipe.disable_lora(),
            lambda pipe: pipe.enable_lora(),
            lambda pipe: pipe.delete_adapters("b"),
            lambda pipe: pipe.set_adapters("a", 0.3),
            lambda pipe: pipe.unload_lora_weights(),
        ):
            seen.append(self.both(pipes, change))
        assert difference(seen[0], seen[-1]) <= TOLERANCE
        assert all(difference(a, b) > 1e-3 for a, b in itertools.pairwise(seen[:5]))
        assert pipes[1].get_list_adapters() == pipes[0].get_list_adapters() == {}

    def pictures(self, pipes: Any, **kwargs: Any) -> Any:
        plain, wrapped = (
            pipe(
                PROMPT,
                height=32,
                width=32,
                max_sequence_length=16,
                num_inference_steps=2,
                generator=torch.Generator().manual_seed(0),
                output_type="np",
                **kwargs,
            ).images
            for pipe in pipes
        )
        assert difference(plain, wrapped) <= TOLERANCE
        return plain

    def test_scale_of_a_call(self, pipes: Any) -> None:
        weights = lora(load_pipeline().transformer, 1)
        self.both(pipes, lambda pipe: pipe.load_lora_weights(dict(weights), adapter_name="a"))
        one, other = (
            self.pictures(pipes, joint_attention_kwargs={"scale": scale}) for scale in (0.2, 0.9)
        )
        assert difference(one, other) > 1e-3
        self.both(pipes, lambda pipe: pipe.unload_lora_weights())

    def test_textual_inversion(self, pipes: Any) -> None:
        token = {"<new>": torch.randn(32, generator=torch.Generator().manual_seed(1))}
        self.both(pipes, lambda pipe: pipe.load_textual_inversion(copy.deepcopy(token)))
        assert "<new>" in pipes[1].tokenizer.get_vocab()

    def test_image_adapter(self, pipes: Any) -> None:
        embeds = torch.randn(1, 1, 10, generator=torch.Generator().manual_seed(0))
        images = {
            "ip_adapter_image_embeds": [embeds],
            "negative_ip_adapter_image_embeds": [torch.zeros(1, 1, 10)],
        }
        weights = image_adapter(pipes[0].transformer, 3)
        found = []
        for pipe in pipes:
            pipe.load_ip_adapter(weights, "w", image_encoder_pretrained_model_name_or_path=None)
        for scale in (1.0, 0.3):
            for pipe in pipes:
                pipe.set_ip_adapter_scale(scale)
            found.append(self.pictures(pipes, **images))
        assert difference(*found) > 1e-3
        self.both(pipes, lambda pipe: pipe.unload_ip_adapter())
