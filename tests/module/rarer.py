"""Tiny pipelines of the families that fewer people use; as in `tests.module.families`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch import nn

from tests import models
from tests.module.families import SIZE, SQUARE, Family, flow, made, noise, pooled, prompts


class Latents(nn.Module):
    """In place of a VAE that a pipeline asks for more than its size; decoding changes nothing."""

    dtype = torch.float32
    device = torch.device("cpu")
    temporal_compression_ratio = 4
    spatial_compression_ratio = 16
    temperal_downsample = (False, True, True)
    mel_compression_ratio = 4
    latents_mean = torch.zeros(1)
    latents_std = torch.ones(1)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            z_dim=channels,
            latent_channels=channels,
            block_out_channels=(1,) * 4,
            scaling_factor=1.0,
            shift_factor=0.0,
            latents_mean=[0.0] * channels,
            latents_std=[1.0] * channels,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            scale_factor_spatial=8,
            scale_factor_temporal=4,
            sample_rate=16000,
            mel_hop_length=160,
            mel_bins=64,
        )

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> Any:
        return SimpleNamespace(sample=latents) if return_dict else (latents,)


class Safe(nn.Module):
    """In place of a checker whose package is not installed; it is asked about prompts only."""

    dtype = torch.float32
    device = torch.device("cpu")


def masks(length: int = 11, *names: str, dtype: torch.dtype = torch.long) -> dict[str, Any]:
    return {name: torch.ones(1, length, dtype=dtype) for name in names}


def bria() -> Any:
    module = made(
        "BriaTransformer2DModel",
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=[0, 4, 4],
    )
    pipe = diffusers.BriaPipeline(module, flow(), Latents(4), None, None)
    return pipe, {**prompts(), **SIZE}


def cogview3() -> Any:
    module = made(
        "CogView3PlusTransformer2DModel",
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=24,
        time_embed_dim=8,
        condition_dim=2,
        pos_embed_max_size=8,
        sample_size=8,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler()
    pipe = diffusers.CogView3PlusPipeline(None, None, None, module, scheduler)
    return pipe, {**prompts(), "original_size": (64, 64), **SQUARE}


def easyanimate() -> Any:
    module = made(
        "EasyAnimateTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=24,
        num_layers=2,
        mmdit_layers=1,
        sample_width=16,
        sample_height=16,
        patch_size=2,
    )
    pipe = diffusers.EasyAnimatePipeline(Latents(4), None, None, module, flow())
    return pipe, {**prompts(mask=torch.long), "num_frames": 5, **SQUARE}


def hidream() -> Any:
    """A list of embeddings, and experts that are chosen token by token."""
    module = made(
        "HiDreamImageTransformer2DModel",
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[24, 16],
        text_emb_dim=40,
        num_routed_experts=2,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=(0, 1),
    )
    pipe = diffusers.HiDreamImagePipeline(flow(), *[None] * 9, module)
    call = {
        "prompt_embeds_t5": noise(1, 11, 24),
        "prompt_embeds_llama3": noise(2, 1, 11, 16),
        "negative_prompt_embeds_t5": noise(1, 11, 24, seed=6),
        "negative_prompt_embeds_llama3": noise(2, 1, 11, 16, seed=6),
        **pooled(40),
    }
    return pipe, {**call, **SQUARE}


def hunyuan_video() -> Any:
    module = made(
        "HunyuanVideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        text_embed_dim=24,
        pooled_projection_dim=20,
        rope_axes_dim=(2, 4, 4),
    )
    pipe = diffusers.HunyuanVideoPipeline(None, None, module, None, flow(), None, None)
    call = {**prompts(mask=torch.long), **pooled(), "true_cfg_scale": 3.0, "num_frames": 5}
    return pipe, {**call, **SIZE}


def hunyuan_video_1_5() -> Any:
    """A guider splits the calls, and is given the transformer."""
    module = made(
        "HunyuanVideo15Transformer3DModel",
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=24,
        text_embed_2_dim=20,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
    )
    guider = ClassifierFreeGuidance(guidance_scale=3.0)
    pipe = diffusers.HunyuanVideo15Pipeline(
        None, None, module, Latents(4), flow(), None, None, guider
    )
    return pipe, {**_two_encoders(), "num_frames": 5, **SIZE}


def hunyuan_image() -> Any:
    """As above, with pictures."""
    module = made(
        "HunyuanImageTransformer2DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1),
        text_embed_dim=24,
        text_embed_2_dim=20,
        rope_axes_dim=(4, 4),
    )
    guider = ClassifierFreeGuidance(guidance_scale=3.0)
    pipe = diffusers.HunyuanImagePipeline(flow(), *[None] * 5, module, guider, guider)
    return pipe, {**_two_encoders(), **SQUARE}


def _two_encoders() -> dict[str, Any]:
    return {
        "prompt_embeds": noise(1, 11, 24),
        "negative_prompt_embeds": noise(1, 11, 24, seed=6),
        **masks(11, "prompt_embeds_mask", "negative_prompt_embeds_mask"),
        "prompt_embeds_2": noise(1, 7, 20),
        "negative_prompt_embeds_2": noise(1, 7, 20, seed=6),
        **masks(7, "prompt_embeds_mask_2", "negative_prompt_embeds_mask_2"),
    }


def cosmos2() -> Any:
    module = made(
        "CosmosTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=24,
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 2.0, 2.0),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    pipe = diffusers.Cosmos2TextToImagePipeline(None, None, module, Latents(4), scheduler, Safe())
    return pipe, {**prompts(), **SIZE}


def krea2() -> Any:
    module = made(
        "Krea2Transformer2DModel",
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=24,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = diffusers.Krea2Pipeline(flow(), None, None, None, module)
    call = {
        "prompt_embeds": noise(1, 11, 2, 24),
        "negative_prompt_embeds": noise(1, 11, 2, 24, seed=6),
        **masks(11, "prompt_embeds_mask", "negative_prompt_embeds_mask", dtype=torch.bool),
    }
    return pipe, {**call, **SQUARE}


def latte() -> Any:
    module = made(
        "LatteTransformer3DModel",
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=24,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        video_length=1,
    )
    pipe = diffusers.LattePipeline(None, None, None, module, diffusers.DDIMScheduler())
    call = {"negative_prompt": None, "video_length": 1, "mask_feature": False}
    return pipe, {**prompts(), **call, **SQUARE}


def lumina() -> Any:
    module = made(
        "LuminaNextDiT2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        cross_attention_dim=24,
    )
    pipe = diffusers.LuminaPipeline(module, flow(), None, None, None)
    return pipe, {**prompts(mask=torch.bool), **SQUARE}


def ovis() -> Any:
    module = made(
        "OvisImageTransformer2DModel",
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = diffusers.OvisImagePipeline(flow(), None, None, None, module)
    return pipe, {**prompts(), "negative_prompt": None, **SQUARE}


def nucleus() -> Any:
    """Experts."""
    module = made(
        "NucleusMoEImageTransformer2DModel",
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=16,
        capacity_factors=[2.0, 2.0],
    )
    pipe = diffusers.NucleusMoEImagePipeline(module, flow(), None, None, None)
    call = masks(11, "prompt_embeds_mask", "negative_prompt_embeds_mask")
    return pipe, {**prompts(), **call, **SQUARE}


def prx() -> Any:
    module = made(
        "PRXTransformer2DModel",
        in_channels=4,
        patch_size=2,
        context_in_dim=24,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=2,
        axes_dim=[4, 4],
    )
    pipe = diffusers.PRXPipeline(module, flow(), None, None)
    return pipe, {**prompts(mask=torch.bool), "use_resolution_binning": False, **SQUARE}


def anyflow() -> Any:
    """A second time."""
    module = made(
        "AnyFlowTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    pipe = diffusers.AnyFlowPipeline(None, None, module, None, scheduler)
    return pipe, {**prompts(), "num_frames": 5, "guidance_scale": 3.0, **SIZE}


def sana_video() -> Any:
    module = made(
        "SanaVideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=24,
        sample_size=8,
        rope_max_seq_len=32,
    )
    pipe = diffusers.SanaVideoPipeline(None, None, None, module, flow())
    call = {"frames": 5, "use_resolution_binning": False, "negative_prompt": None}
    return pipe, {**prompts(mask=torch.long), **call, **SQUARE}


def dit() -> Any:
    """Classes, both halves of the guidance in one call."""
    module = made(
        "DiTTransformer2DModel",
        sample_size=8,
        num_layers=2,
        patch_size=4,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
    )
    pipe = diffusers.DiTPipeline(module, Latents(4), diffusers.DDIMScheduler())
    return pipe, {"class_labels": [3]}


def ltx2() -> Any:
    """Video and sound at once; a second output."""
    module = made(
        "LTX2VideoTransformer3DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=128,
        audio_out_channels=128,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=24,
        rope_double_precision=False,
    )
    connectors = LTX2TextConnectors(
        caption_channels=24,
        text_proj_in_factor=2,
        video_connector_num_attention_heads=3,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=3,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        rope_double_precision=False,
    )
    connectors = models.randomise(connectors).eval()
    pipe = diffusers.LTX2Pipeline(
        flow(), Latents(4), Latents(8), None, None, connectors, module, None
    )
    call = {"num_frames": 9, "spatio_temporal_guidance_blocks": [1], "stg_scale": 0.0}
    return pipe, {**prompts(48, mask=torch.long), **call, **SQUARE}


def helios() -> Any:
    """Chunk after chunk, each with what came before."""
    module = made(
        "HeliosTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_dim=(4, 4, 4),
        has_multi_term_memory_patch=True,
    )
    pipe = diffusers.HeliosPipeline(
        None, None, Latents(4), diffusers.HeliosScheduler(stages=1, stage_range=[0, 1]), module
    )
    return pipe, {**prompts(), "num_frames": 33, "num_latent_frames_per_chunk": 3, **SQUARE}


def kandinsky6() -> Any:
    """Video and sound."""
    module = made(
        "Kandinsky6Transformer3DModel",
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=24,
        in_text_dim2=20,
        time_dim=16,
        model_dim=24,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 2),
        in_audio_dim=4,
        out_audio_dim=4,
        model_dim_a=12,
        time_dim_a=16,
        ff_dim_a=32,
        axes_dims_a=(2, 2, 2),
    )
    pipe = diffusers.Kandinsky6TI2VAPipeline(module, Latents(4), None, None, None, None, flow())
    call = {**prompts(), **pooled(), "num_frames": 5, "sample_audio": False}
    return pipe, {**call, **SQUARE}


def glm_image() -> Any:
    """Tokens of a language model beside the prompt."""
    module = made(
        "GlmImageTransformer2DModel",
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=24,
        time_embed_dim=8,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=32,
    )
    pipe = diffusers.GlmImagePipeline(None, None, None, None, Latents(4), module, flow())
    tokens = torch.arange(16).reshape(1, 16)
    return pipe, {**prompts(), "prior_token_ids": tokens, **SQUARE}


def allegro() -> Any:
    module = made(
        "AllegroTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=48,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=24,
    )
    pipe = diffusers.AllegroPipeline(None, None, Latents(4), module, diffusers.DDIMScheduler())
    call = {"num_frames": 8, "negative_prompt": None}
    return pipe, {**prompts(mask=torch.long), **call, **SQUARE}


def stable_cascade() -> Any:
    """A prior: image embeddings out of embeddings of text."""
    module = made(
        "StableCascadeUNet",
        conditioning_dim=16,
        block_out_channels=(16, 16),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        )
        * 2,
        switch_level=(False,),
        clip_image_in_channels=20,
        clip_text_in_channels=24,
        clip_text_pooled_in_channels=20,
        dropout=(0.1, 0.1),
        in_channels=4,
        out_channels=4,
        patch_size=1,
        timestep_ratio_embedding_dim=8,
        self_attn=True,
    )
    scheduler = diffusers.DDPMWuerstchenScheduler()
    pipe = diffusers.StableCascadePriorPipeline(None, Safe(), module, scheduler, 42.67)
    call = {
        "prompt_embeds": noise(1, 11, 24),
        "prompt_embeds_pooled": noise(1, 1, 20),
        "negative_prompt_embeds": noise(1, 11, 24, seed=6),
        "negative_prompt_embeds_pooled": noise(1, 1, 20, seed=6),
    }
    return pipe, {**call, "output_type": "pt", "height": 128, "width": 128}


RARER: dict[str, Family] = {
    family.__name__: family
    for family in (
        bria,
        cogview3,
        easyanimate,
        hidream,
        hunyuan_video,
        hunyuan_video_1_5,
        hunyuan_image,
        cosmos2,
        ltx2,
        helios,
        kandinsky6,
        glm_image,
        allegro,
        stable_cascade,
        krea2,
        latte,
        lumina,
        ovis,
        nucleus,
        prx,
        anyflow,
        sana_video,
        dit,
    )
}
