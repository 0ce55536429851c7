"""Pipelines of every family on stubs: what they do with a denoiser goes on working."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests.module.families import (
    FAMILIES,
    animatediff,
    cogvideox,
    denoisers,
    flux2_klein_kv,
    made,
    noise,
    run,
    stable_diffusion,
)
from tests.module.rarer import RARER
from tests.module.standin import Ranks, stub_of

Pair = tuple[Any, Any, dict[str, Any]]


def twins(make: Callable[[], Any]) -> Pair:
    """A plain pipeline and one on stubs, and the arguments of a call."""
    (plain, call), (pipe, _) = make(), make()
    for name in denoisers(pipe):
        setattr(pipe, name, stub_of(getattr(pipe, name), 2)[0])
    return plain, pipe, call


def compare(pair: Pair) -> torch.Tensor:
    plain, pipe, call = pair
    expected = run(plain, call)
    assert expected.isfinite().all()
    assert expected.std() > 0.1
    assert torch.equal(run(pipe, call), expected)
    return expected


ALL = FAMILIES | RARER

# Folders of pipelines with a denoiser of which none is built here, and why. What these ask of it is
# read from their source in test_sources; the models themselves can be split all the same.
ENCODES = "wants a language model or processor of its own for every call"
IMAGES = "starts from pictures or sound, which it encodes for every call"
LIKE_SD = "calls its UNet as stable_diffusion does"
LIKE_FLUX = "calls its transformer as flux does"
NOT_BUILT = {
    "ace_step": ENCODES,
    "audioldm2": ENCODES,
    "bria_fibo": ENCODES,
    "bria_fibo2": ENCODES,
    "chronoedit": IMAGES,
    "consisid": IMAGES,
    "consistency_models": LIKE_SD,
    "controlnet_sd3": "calls its transformer as stable_diffusion_3 does",
    "controlnet_hunyuandit": "calls its transformer as hunyuandit does",
    "ddim": LIKE_SD,
    "ddpm": LIKE_SD,
    "deepfloyd_if": LIKE_SD,
    "dreamlite": ENCODES,
    "ernie_image": ENCODES,
    "ideogram4": ENCODES,
    "joyimage": ENCODES,
    "kandinsky": LIKE_SD,
    "kandinsky2_2": LIKE_SD,
    "kandinsky3": LIKE_SD,
    "kolors": "calls its UNet as stable_diffusion_xl does",
    "latent_consistency_models": LIKE_SD,
    "latent_diffusion": LIKE_SD,
    "ledits_pp": LIKE_SD,
    "longcat_audio_dit": IMAGES,
    "longcat_image": ENCODES,
    "marigold": LIKE_SD,
    "motif_video": ENCODES,
    "omnigen": ENCODES,
    "qwenimage21": ENCODES,
    "rfd4_proteina": "makes molecules, of a structure file",
    "sana_wm": IMAGES,
    "shap_e": IMAGES,
    "stable_audio": IMAGES,
    "stable_audio_3": IMAGES,
    "stable_video_diffusion": IMAGES,
    "t2i_adapter": LIKE_SD,
    "visualcloze": LIKE_FLUX,
}


def test_each_family_is_built_or_says_why_not() -> None:
    """A family that is new in diffusers shows up here."""
    call = re.compile(r"self\.(transformer|transformer_2|unet|prior|decoder)\(")
    root = Path(diffusers.__file__).parent / "pipelines"
    folders = {
        path.parent.name
        for path in root.glob("*/pipeline_*.py")
        if call.search(path.read_text()) and path.parent.name != "deprecated"
    }
    built = {type(make()[0]).__module__.split(".")[2] for make in ALL.values()}
    assert folders - built == NOT_BUILT.keys()


@pytest.mark.parametrize("family", ALL)
def test_same_result_as_plain(family: str) -> None:  # R50, R68
    pair = twins(ALL[family])
    first = compare(pair)
    assert torch.equal(compare(pair), first)  # and nothing is left behind by the first run
    plain, pipe, _ = pair
    for name in denoisers(pipe):
        assert getattr(pipe, name).gang.calls
    for attribute in ("device", "_execution_device", "dtype"):
        assert getattr(pipe, attribute) == getattr(plain, attribute)
    assert pipe.components.keys() == plain.components.keys()


def test_fused_projections() -> None:
    pair = twins(cogvideox)
    for pipe in pair[:2]:
        pipe.fuse_qkv_projections()
    assert compare(pair) is not None
    gang = pair[1].transformer.gang
    fused = "FusedCogVideoXAttnProcessor2_0"
    for worker in gang.workers:
        kinds = {type(p).__name__ for p in worker.module.attn_processors.values()}
        assert kinds == {fused}
    for pipe in pair[:2]:
        pipe.unfuse_qkv_projections()
    compare(pair)


def test_what_a_unet_can_be_told() -> None:
    pair = twins(stable_diffusion)
    seen = [compare(pair)]
    for change in (
        lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
        lambda pipe: pipe.disable_freeu(),
        lambda pipe: pipe.enable_attention_slicing(1),
        lambda pipe: pipe.disable_attention_slicing(),
        lambda pipe: pipe.unet.set_default_attn_processor(),
        lambda pipe: pipe.unet.to(memory_format=torch.channels_last),
        lambda pipe: pipe.unet.apply(torch.nn.Module.eval),
    ):
        for pipe in pair[:2]:
            change(pipe)
        seen.append(compare(pair))
    assert not torch.equal(seen[0], seen[1])
    assert torch.allclose(seen[0], seen[2])


def test_blocks_that_a_pipeline_replaces() -> None:
    """FreeNoise puts other blocks into the motion modules; it needs real prompts to run."""
    plain, pipe, _ = twins(animatediff)
    call = (noise(1, 4, 8, 8, 8), 1, noise(8, 11, 24))
    outputs = []
    for change in (
        lambda pipe: None,
        lambda pipe: pipe.enable_free_noise(context_length=4, context_stride=2),
        lambda pipe: pipe.disable_free_noise(),
    ):
        with torch.no_grad():
            for each in (plain, pipe):
                change(each)
            outputs.append(plain.unet(*call)[0])
            assert torch.equal(pipe.unet(*call)[0], outputs[-1])
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_processors_that_a_pipeline_sets_block_by_block_when_it_is_made() -> None:
    plain, call = flux2_klein_kv()
    module = copy.deepcopy(plain.transformer)
    module.set_attn_processor(copy.deepcopy(plain.transformer.transformer_blocks[0].attn.processor))
    for block in module.transformer_blocks:
        block.attn.set_processor(type(block.attn)._default_processor_cls())
    stub, ranks = stub_of(module, 2)
    parts = [plain.components[name] for name in ("scheduler", "vae", "text_encoder", "tokenizer")]
    pipe = diffusers.Flux2KleinKVPipeline(*parts, stub)
    compare((plain, pipe, call))
    kind = type(plain.transformer.transformer_blocks[0].attn.processor)
    for worker in ranks.workers:
        assert type(worker.module.transformer_blocks[0].attn.processor) is kind


def test_helpers_that_need_weights_are_asked_of_a_rank_where_there_are_none_here() -> None:
    from raymod.weights import free

    prior = made("PriorTransformer", num_attention_heads=2, attention_head_dim=12, embedding_dim=20)
    latents = torch.randn(1, 20)
    expected = prior.post_process_latents(latents)
    ranks = Ranks(prior, 2)
    stub, _ = stub_of(prior, ranks=ranks)
    assert torch.equal(stub.post_process_latents(latents), expected)
    assert ranks.sent_bytes == 0
    freed, _ = stub_of(prior, ranks=ranks, freed=free(prior))
    assert prior.clip_std.is_meta
    assert torch.equal(freed.post_process_latents(latents), expected)
    assert ranks.sent_bytes > 0


def test_the_configuration_may_be_changed_in_place() -> None:
    stub, ranks = stub_of(stable_diffusion()[0].unet, 2)
    stub.config.encoder_hid_dim_type = "ip_image_proj"
    stub._internal_dict = diffusers.configuration_utils.FrozenDict(
        {**stub.config, "sample_size": 9}
    )
    stub.register_to_config(noted=3)
    with torch.no_grad():
        stub(torch.randn(1, 4, 8, 8), 1, torch.randn(1, 11, 24))
    for worker in ranks.workers:
        assert worker.module.config.sample_size == 9
        assert worker.module.config.noted == 3
    stub.config.encoder_hid_dim_type = "text_proj"
    stub.train()  # a change brings it along, as a call does
    assert ranks.workers[1].module.config.encoder_hid_dim_type == "text_proj"
