"""A LoRA through a stub: what travels, what is reported, and what happens when it does not fit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from raymod.errors import ConfigError, RankError, UnsupportedError
from raymod.module import restore_local
from raymod.weights import free
from tests.module.sequences import flux, lora
from tests.module.standin import Ranks, stub_of
from tests.module.test_sequences import call

FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture
def pair() -> Any:
    return stub_of(flux(), 2)


def nbytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in weights.values())


def snapshot(ranks: Ranks) -> list[dict[str, torch.Tensor]]:
    sides = [worker.module.state_dict() for worker in ranks.workers]
    return [{name: value.clone() for name, value in side.items()} for side in sides]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def test_only_the_weights_of_the_adapter_travel(pair: Any) -> None:
    stub, ranks = pair
    weights = lora(flux(), 1)
    others = {f"text_encoder.layer{n}.lora_A.weight": torch.zeros(1000) for n in range(50)}
    stub.load_lora_adapter({**weights, **others}, adapter_name="a")
    model_bytes = sum(value.nbytes for value in flux().state_dict().values())
    most = nbytes(weights) + torch.get_rng_state().nbytes + 5000
    assert nbytes(weights) <= ranks.sent_bytes < most < model_bytes
    sent = ranks.sent_bytes
    stub.set_adapters("a", 0.3)
    stub.fuse_lora()
    stub.unfuse_lora()
    assert ranks.sent_bytes - sent < 2000


def test_weights_drawn_at_random_are_the_same_everywhere(pair: Any) -> None:
    stub, ranks = pair
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "proj_out"])
    torch.manual_seed(5)
    stub.add_adapter(config, "drawn")
    one, other = snapshot(ranks)
    names = [name for name in one if "lora_" in name]
    assert names
    assert all(torch.equal(one[name], other[name]) for name in names)
    plain = flux()
    torch.manual_seed(5)
    plain.add_adapter(config, "drawn")
    assert all(torch.equal(one[name], plain.state_dict()[name]) for name in names)


def test_how_many_weights_fitted_is_reported(pair: Any, caplog: Any) -> None:
    stub, _ = pair
    weights = lora(flux(), 1)
    extra = {"transformer.no.such.layer.lora_A.weight": torch.zeros(3, 4)}
    caplog.set_level(logging.INFO, logger="raymod")
    with pytest.warns(UserWarning, match=r"30 of 31 weights fit .*; not transformer\.no\.such"):
        stub.load_lora_adapter({**weights, **extra}, adapter_name="a")
    report = stub.adapters["a"]
    assert report.matched == len(weights) == 30
    assert report.unmatched == tuple(extra)
    assert report.nbytes == nbytes({**weights, **extra})
    assert "adapter 'a': 30 of 31 weights fit FluxTransformer2DModel" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda key: key.replace("attn", "attention").replace("proj", "pr"), "none of the LoRA's"),
        (lambda key: key.replace("transformer.", "unet."), "starts with 'transformer'"),
    ],
)
def test_a_lora_of_another_model_is_an_error(pair: Any, change: Any, said: str) -> None:
    stub, ranks = pair
    before = snapshot(ranks)
    weights = {change(key): value for key, value in lora(flux(), 1).items() if "x_emb" not in key}
    weights = {key: value for key, value in weights.items() if "net.2" not in key}
    with pytest.raises(ConfigError, match=said) as caught:
        stub.load_lora_adapter(weights)
    assert next(iter(weights)) in str(caught.value)
    with pytest.raises(ConfigError, match="no weights at all"):
        stub.load_lora_adapter({})
    assert ranks.sent_bytes == 0
    assert same(before, snapshot(ranks))
    assert not stub.adapters


def test_a_lora_for_the_text_encoders_only_is_none_of_ours(pair: Any) -> None:
    stub, ranks = pair
    stub.load_lora_adapter({"text_encoder.layer.lora_A.weight": torch.zeros(3, 4)})
    assert ranks.sent_bytes == 0


def test_files_are_read_on_the_driver(pair: Any, tmp_path: Any) -> None:
    stub, _ = pair
    plain = flux()
    plain.load_lora_adapter(lora(plain, 1), adapter_name="a")
    plain.save_lora_adapter(tmp_path, adapter_name="a")
    for module in (plain, stub):
        module.load_lora_adapter(tmp_path, weight_name=FILE, prefix=None, adapter_name="b")
    (tmp_path / FILE).unlink()
    for module in (plain, stub):
        module.set_adapters("b", 0.5)
    assert torch.equal(call(plain), call(stub))
    assert not torch.equal(call(plain), call(flux()))


def test_it_saves_what_a_plain_one_saves(pair: Any, tmp_path: Any) -> None:
    stub, _ = pair
    plain = flux()
    for module, name in ((plain, "one"), (stub, "other")):
        module.load_lora_adapter(lora(flux(), 1), adapter_name="a")
        module.save_lora_adapter(tmp_path / name, adapter_name="a")
    one, other = (load_file(tmp_path / name / FILE) for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_adapters_from_before_wrapping_go_on() -> None:
    plain, module = flux(), flux()
    for each in (plain, module):
        each.load_lora_adapter(lora(flux(), 1), adapter_name="a")
        each.load_lora_adapter(lora(flux(), 2), adapter_name="b")
        each.set_adapters(["a", "b"], [0.5, 0.7])
    stub, _ = stub_of(module, 2)
    assert torch.equal(call(plain), call(stub))
    for change in (
        lambda m: m.set_adapters("b", 1.2),
        lambda m: m.fuse_lora(adapter_names=["b"]),
        lambda m: m.unfuse_lora(),
        lambda m: m.delete_adapters("a"),
        lambda m: m.unload_lora(),
    ):
        change(plain)
        change(stub)
        assert torch.equal(call(plain), call(stub))


def test_different_ranks_may_be_hotswapped_once_prepared(pair: Any) -> None:
    stub, _ = pair
    plain = flux()
    for module in (plain, stub):
        module.enable_lora_hotswap(target_rank=8)
        module.load_lora_adapter(lora(flux(), 1, rank=3), adapter_name="a")
        module.load_lora_adapter(lora(flux(), 2, rank=5), adapter_name="a", hotswap=True)
    assert torch.equal(call(plain), call(stub))


@pytest.mark.parametrize("failing", ["load_lora_adapter", "set_adapters", "fuse_lora", "hotswap"])
def test_if_a_rank_cannot_all_are_as_before(pair: Any, failing: str) -> None:
    stub, ranks = pair
    stub.load_lora_adapter(lora(flux(), 1), adapter_name="a")
    expected, before = call(stub), snapshot(ranks)
    local = {name: value.clone() for name, value in stub.state_dict().items()}
    victim = ranks.workers[1].module
    method = "load_lora_adapter" if failing == "hotswap" else failing
    done = getattr(victim, method)

    def fails(*args: Any, **kwargs: Any) -> None:
        done(*args, **kwargs)  # to the last, so that all of it has to be taken back
        raise RuntimeError("no memory left on this rank")

    object.__setattr__(victim, method, fails)
    change = {
        "load_lora_adapter": lambda: stub.load_lora_adapter(lora(flux(), 2), adapter_name="b"),
        "hotswap": lambda: stub.load_lora_adapter(lora(flux(), 2), adapter_name="a", hotswap=True),
        "set_adapters": lambda: stub.set_adapters("a", 0.1),
        "fuse_lora": lambda: stub.fuse_lora(lora_scale=0.5),
    }[failing]
    with pytest.raises(RuntimeError, match="no memory left") as caught:
        change()
    assert isinstance(caught.value, RankError)
    del victim.__dict__[method]
    assert same(before, snapshot(ranks))
    assert local.keys() == stub.state_dict().keys()
    assert all(torch.equal(value, local[name]) for name, value in stub.state_dict().items())
    assert torch.equal(call(stub), expected)
    change()  # and it still can
    assert not torch.equal(call(stub), expected)


def test_a_wrong_name_is_the_driver_s_own_error(pair: Any) -> None:
    stub, ranks = pair
    stub.load_lora_adapter(lora(flux(), 1), adapter_name="a")
    sent = ranks.sent_bytes
    for module in (stub, flux()):
        with pytest.raises(ValueError, match=r"Length of adapter names"):
            module.set_adapters(["a", "b"], [1.0])
    assert ranks.sent_bytes - sent < 100  # they were asked whether they live


def test_unwrapped_weights_have_what_was_loaded() -> None:
    """With `keep_local=False` too, where the driver had nothing."""
    plain, module = flux(), flux()
    ranks = Ranks(module, 2)
    stub, _ = stub_of(module, ranks=ranks, freed=free(module))
    for each in (plain, stub):
        each.load_lora_adapter(lora(flux(), 1), adapter_name="a")
        each.set_adapters("a", 0.5)
        each.fuse_lora()
    assert all(parameter.is_meta for parameter in module.parameters())
    restored = restore_local(stub)
    assert restored is module
    assert torch.equal(call(plain), call(restored))
    plain.unfuse_lora()
    restored.unfuse_lora()
    assert torch.equal(call(plain), call(restored))


def test_a_part_that_was_replaced_comes_back_too() -> None:
    """Without local weights: in its own objects, and though no call was made since."""
    module = flux()
    stub, _ = stub_of(module, ranks=Ranks(module, 2), freed=free(module))
    part = torch.nn.Linear(256, 64)
    weight = part.weight.detach().clone()
    stub.transformer_blocks[0].ff.net[2] = part
    stub.transformer_blocks[0].attn.to_q = torch.nn.Linear(64, 64, bias=False)  # another shape
    restored = restore_local(stub)
    assert restored.transformer_blocks[0].ff.net[2] is part
    assert torch.equal(part.weight, weight)
    assert not any(parameter.is_meta for parameter in restored.parameters())
    call(restored)


def image_adapter(module: Any, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter for a Flux of two double blocks or less: image embeddings of 10 numbers."""
    generator = torch.Generator().manual_seed(seed)
    text, hidden = module.config.joint_attention_dim, module.inner_dim
    draw = lambda *shape: 0.3 * torch.randn(*shape, generator=generator)  # noqa: E731
    layers = {}
    for block in range(module.config.num_layers):
        for name in ("to_k_ip", "to_v_ip"):
            layers[f"{block}.{name}.weight"] = draw(hidden, text)
            layers[f"{block}.{name}.bias"] = draw(hidden)
    projection = {
        "proj.weight": draw(4 * text, 10),
        "proj.bias": draw(4 * text),
        "norm.weight": 1 + draw(text),
        "norm.bias": draw(text),
    }
    return {"image_proj": projection, "ip_adapter": layers}


def test_an_image_adapter_and_its_scale(pair: Any) -> None:
    stub, ranks = pair
    plain = flux()
    weights = image_adapter(plain, 3)

    def compare() -> torch.Tensor:
        with torch.no_grad():
            from tests import models

            kwargs = models.flux()[1](1)
            kwargs["joint_attention_kwargs"] = {"ip_adapter_image_embeds": [image]}
            one, other = plain(**kwargs)[0], stub(**kwargs)[0]
        assert torch.equal(one, other)
        return one

    image = torch.randn(1, 1, 10, generator=torch.Generator().manual_seed(0))
    for module in (plain, stub):
        module._load_ip_adapter_weights([weights])
    assert stub.encoder_hid_proj.num_ip_adapters == 1
    assert ranks.sent_bytes < 40_000
    first = compare()
    for module in (plain, stub):
        for processor in module.attn_processors.values():
            if hasattr(processor, "scale"):
                processor.scale = [0.2]  # as `set_ip_adapter_scale` does
    assert not torch.equal(compare(), first)
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    for module in (plain, stub):
        module.encoder_hid_proj = None
        module.set_attn_processor(FluxAttnProcessor())
    assert torch.equal(call(plain), call(stub))


def test_a_hook_on_a_part_would_not_run_and_is_refused(pair: Any) -> None:
    stub, _ = pair
    handle = stub.transformer_blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"transformer_blocks\.0, a part of"):
        call(stub)
    handle.remove()
    call(stub)


def test_a_forward_set_on_a_part_would_not_run_and_is_refused(pair: Any) -> None:
    stub, _ = pair
    part = stub.transformer_blocks[0].ff
    part.forward = lambda x: x
    with pytest.raises(UnsupportedError, match=r"transformer_blocks\.0\.ff, a part of"):
        call(stub)
    del part.forward
    call(stub)


def _load(module: Any) -> None:
    part = module.transformer_blocks[0].ff
    part.load_state_dict({name: -value for name, value in part.state_dict().items()})


def _write(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def _swap(module: Any) -> None:
    module.proj_out.weight.data = 2 * module.proj_out.weight.data


def _cast(module: Any) -> None:
    module.norm_out.half().float()
    module.proj_out.double().float()


@pytest.mark.parametrize("write", [_load, _write, _swap, _cast])
def test_weights_of_parts_that_are_written_reach_the_ranks(pair: Any, write: Any) -> None:
    stub, ranks = pair
    plain = flux()
    before = call(plain)
    assert torch.equal(before, call(stub))
    for module in (plain, stub):
        write(module)
    if write is not _cast:
        assert not torch.equal(call(plain), before)
    assert torch.equal(call(plain), call(stub))
    sent = ranks.sent_bytes
    call(stub)
    assert ranks.sent_bytes == sent  # once


def test_a_weight_without_storage_of_its_own_is_no_obstacle() -> None:
    module = torch.nn.Linear(3, 3)
    module.register_buffer("table", torch.eye(3).to_sparse())
    stub, _ = stub_of(module)
    assert len(list(stub.parameters())) == 2  # from here on writes are looked for
    with torch.no_grad():
        x = torch.ones(1, 3)
        assert torch.equal(stub(x), module(x))


def test_weights_that_are_not_here_cannot_be_written() -> None:
    module = flux()
    stub, _ = stub_of(module, ranks=Ranks(module, 2), freed=free(module))
    with torch.no_grad():
        stub.proj_out.weight.mul_(2)
    with pytest.raises(
        UnsupportedError, match=r"proj_out\.weight was written to, but .* no weights"
    ):
        call(stub)


def test_attributes_of_parts_are_set_on_the_ranks(pair: Any) -> None:
    """GLIGEN switches layers on and off so; FreeNoise and others set numbers."""
    stub, ranks = pair
    for part in stub.modules():
        if type(part).__name__ == "FluxTransformerBlock":
            part.enabled = False
            part.sizes = [1, 2]
    call(stub)
    stub.transformer_blocks[0].sizes.append(3)
    del stub.transformer_blocks[0].enabled
    call(stub)
    for worker in ranks.workers:
        block = worker.module.transformer_blocks[0]
        assert block.sizes == [1, 2, 3]
        assert not hasattr(block, "enabled")


def test_a_part_may_be_set_and_taken_away(pair: Any) -> None:
    """As a pipeline does with the positions of a ControlNet, and with image projections."""
    stub, ranks = pair
    stub.projection = torch.nn.Linear(2, 2)
    for worker in ranks.workers:
        assert torch.equal(worker.module.projection.weight, stub.projection.weight)
    stub.projection = None
    assert all(worker.module.projection is None for worker in ranks.workers)
    call(stub)


def test_parts_that_are_replaced_are_replaced_on_the_ranks(pair: Any) -> None:
    stub, _ = pair
    plain = flux()
    for module in (plain, stub):
        torch.manual_seed(4)
        module.transformer_blocks[0].ff.net[2] = torch.nn.Linear(256, 64)
        module.transformer_blocks[0].attn.to_q.weight = torch.nn.Parameter(torch.randn(64, 64))
    assert torch.equal(call(plain), call(stub))
    assert not torch.equal(call(plain), call(flux()))
