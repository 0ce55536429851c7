"""A tiny pipeline of each family, without text encoders: prompts are given as embeddings.

Each function gives the pipeline and the arguments of a call. Where a pipeline asks something
unusual of its denoiser, the docstring says what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import nn

from tests import models

Family = Callable[[], tuple[Any, dict[str, Any]]]

SIZE = {"height": 32, "width": 48}
SQUARE = {"height": 64, "width": 64}


def noise(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(name: str, **config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = getattr(diffusers, name)(**config)
    return models.randomise(module).eval()


def prompts(width: int = 24, length: int = 11, *, mask: Any = None) -> dict[str, Any]:
    """A prompt and a negative one, as embeddings, with their masks where a dtype is given."""
    found: dict[str, Any] = {
        "prompt_embeds": noise(1, length, width),
        "negative_prompt_embeds": noise(1, length, width, seed=6),
    }
    if mask is not None:
        found["prompt_attention_mask"] = torch.ones(1, length, dtype=mask)
        found["negative_prompt_attention_mask"] = torch.ones(1, length, dtype=mask)
    return found


def pooled(width: int = 20) -> dict[str, Any]:
    return {
        "pooled_prompt_embeds": noise(1, width),
        "negative_pooled_prompt_embeds": noise(1, width, seed=6),
    }


def flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def flux() -> Any:
    call = {"prompt_embeds": noise(1, 11, 24), "pooled_prompt_embeds": noise(1, 20)}
    pipe = diffusers.FluxPipeline(flow(), None, None, None, None, None, models.flux()[0])
    return pipe, {**call, **SIZE}


def flux2() -> Any:
    pipe = diffusers.Flux2Pipeline(flow(), None, None, None, models.flux2()[0])
    return pipe, {"prompt_embeds": noise(1, 11, 24), **SIZE}


def qwenimage() -> Any:
    masks = {
        "prompt_embeds_mask": torch.ones(1, 11).long(),
        "negative_prompt_embeds_mask": torch.ones(1, 11).long(),
    }
    pipe = diffusers.QwenImagePipeline(flow(), None, None, None, models.qwenimage()[0])
    return pipe, {**prompts(), **masks, "true_cfg_scale": 3.0, **SIZE}


def wan() -> Any:
    module = models.wan(in_channels=4, out_channels=4)[0]
    pipe = diffusers.WanPipeline(None, None, None, flow(), module)
    return pipe, {**prompts(), "num_frames": 5, **SIZE}


def wan_of_two() -> Any:
    """The second transformer takes over at low noise."""
    first, second = (models.wan(in_channels=4, out_channels=4, seed=n)[0] for n in (0, 3))
    pipe = diffusers.WanPipeline(None, None, None, flow(), first, second, boundary_ratio=0.7)
    return pipe, {**prompts(), "num_frames": 5, **SIZE}


def ltx() -> Any:
    pipe = diffusers.LTXPipeline(flow(), None, None, None, models.ltx()[0])
    return pipe, {**prompts(mask=torch.long), "num_frames": 9, "height": 64, "width": 96}


def sd3() -> Any:
    module = made(
        "SD3Transformer2DModel",
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        out_channels=4,
    )
    pipe = diffusers.StableDiffusion3Pipeline(module, flow(), *[None] * 7)
    return pipe, {**prompts(32), **pooled(), **SIZE}


def cogvideox() -> Any:
    module = made(
        "CogVideoXTransformer3DModel",
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=24,
        num_layers=2,
        sample_width=6,
        sample_height=4,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=11,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler()
    pipe = diffusers.CogVideoXPipeline(None, None, None, module, scheduler)
    return pipe, {**prompts(), "num_frames": 9, **SIZE}


def hunyuandit() -> Any:
    """Reads `inner_dim` and `num_heads`."""
    module = made(
        "HunyuanDiT2DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=32,
        num_layers=2,
        cross_attention_dim=24,
        cross_attention_dim_t5=24,
        pooled_projection_dim=16,
        text_len=7,
        text_len_t5=9,
        activation_fn="gelu-approximate",
    )
    call: dict[str, Any] = {**prompts(length=7, mask=torch.long)}
    others = prompts(length=9, mask=torch.long)
    call |= {f"{name}_2": value for name, value in others.items()}
    scheduler = diffusers.DDPMScheduler()
    parts = (None, None, None, module, scheduler, None, None)
    pipe = diffusers.HunyuanDiTPipeline(*parts, requires_safety_checker=False)
    size = {"height": 128, "width": 128, "use_resolution_binning": False}
    return pipe, {**call, **size}


def pixart() -> Any:
    module = made(
        "PixArtTransformer2DModel",
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=24,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
    )
    pipe = diffusers.PixArtSigmaPipeline(None, None, None, module, diffusers.DDIMScheduler())
    others = {"negative_prompt": None, "use_resolution_binning": False}
    return pipe, {**prompts(mask=torch.long), **others, **SQUARE}


def sana() -> Any:
    module = made(
        "SanaTransformer2DModel",
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=24,
        sample_size=32,
    )
    pipe = diffusers.SanaPipeline(None, None, None, module, flow())
    others = {"negative_prompt": None, "use_resolution_binning": False}
    return pipe, {**prompts(mask=torch.long), **others, "height": 128, "width": 128}


def chroma() -> Any:
    module = made(
        "ChromaTransformer2DModel",
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=[4, 4, 8],
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    pipe = diffusers.ChromaPipeline(flow(), None, None, None, module)
    return pipe, {**prompts(mask=torch.bool), **SIZE}


def auraflow() -> Any:
    module = made(
        "AuraFlowTransformer2DModel",
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=24,
        out_channels=4,
        pos_embed_max_size=256,
    )
    pipe = diffusers.AuraFlowPipeline(None, None, None, module, flow())
    return pipe, {**prompts(mask=torch.long), **SIZE}


def lumina2() -> Any:
    module = made(
        "Lumina2Transformer2DModel",
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=[4, 2, 2],
        axes_lens=[128, 128, 128],
        cap_feat_dim=24,
    )
    pipe = diffusers.Lumina2Pipeline(module, flow(), None, None, None)
    return pipe, {**prompts(mask=torch.bool), **SIZE}


def cogview4() -> Any:
    module = made(
        "CogView4Transformer2DModel",
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=24,
        time_embed_dim=8,
        condition_dim=4,
    )
    pipe = diffusers.CogView4Pipeline(None, None, None, module, flow())
    return pipe, {**prompts(length=16), **SIZE}


def mochi() -> Any:
    module = made(
        "MochiTransformer3DModel",
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=24,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    pipe = diffusers.MochiPipeline(flow(), None, None, None, module)
    return pipe, {**prompts(length=16, mask=torch.bool), "num_frames": 7, **SIZE}


def skyreels() -> Any:
    """Sets the attention of its transformer by a private method, `_set_ar_attention`."""
    module = made(
        "SkyReelsV2Transformer3DModel",
        patch_size=(1, 2, 2),
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
    scheduler = diffusers.UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True)
    pipe = diffusers.SkyReelsV2DiffusionForcingPipeline(None, None, module, None, scheduler)
    video = {"num_frames": 9, "base_num_frames": 9, "ar_step": 1, "causal_block_size": 1}
    return pipe, {**prompts(), "prompt": None, **video, **SIZE}


def kandinsky5() -> Any:
    """Reads `visual_cond`."""
    module = made(
        "Kandinsky5Transformer3DModel",
        in_visual_dim=4,
        in_text_dim=24,
        in_text_dim2=20,
        time_dim=16,
        out_visual_dim=4,
        patch_size=(1, 2, 2),
        model_dim=48,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(8, 8, 8),
        visual_cond=True,
        attention_type="regular",
    )
    pipe = diffusers.Kandinsky5T2VPipeline(module, None, None, None, None, None, flow())
    lengths = torch.tensor([0, 11], dtype=torch.int32)
    call = {
        "prompt_embeds_qwen": noise(1, 11, 24),
        "prompt_embeds_clip": noise(1, 20),
        "negative_prompt_embeds_qwen": noise(1, 11, 24, seed=6),
        "negative_prompt_embeds_clip": noise(1, 20, seed=6),
        "prompt_cu_seqlens": lengths,
        "negative_prompt_cu_seqlens": lengths,
    }
    return pipe, {**call, "num_frames": 5, **SIZE}


def zimage() -> Any:
    """Gives lists of tensors."""
    module = made(
        "ZImageTransformer2DModel",
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=48,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=24,
        axes_dims=[8, 8, 8],
        axes_lens=[64, 64, 64],
    )
    pipe = diffusers.ZImagePipeline(flow(), None, None, None, module)
    call = {"prompt_embeds": [noise(11, 24)], "negative_prompt_embeds": [noise(7, 24, seed=6)]}
    return pipe, {**call, **SQUARE}


def flux2_klein_kv() -> Any:
    """Puts processors on each block when it is made; keys and values go out and in again."""
    from PIL import Image

    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(4,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        latent_channels=3,
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=32,
        patch_size=(2, 2),
    ).eval()
    models.randomise(vae)
    pipe = diffusers.Flux2KleinKVPipeline(flow(), vae, None, None, models.flux2()[0])
    image = Image.new("RGB", (64, 64), (200, 30, 90))
    return pipe, {"prompt_embeds": noise(1, 11, 24), "image": image, **SQUARE}


UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "cross_attention_dim": 24,
    "norm_num_groups": 2,
}


def unet(**config: Any) -> nn.Module:
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 2,
    }
    return made("UNet2DConditionModel", **{**UNET, **blocks, **config})


def stable_diffusion() -> Any:
    parts = (None, None, None, unet(), diffusers.DDIMScheduler(), None, None)
    pipe = diffusers.StableDiffusionPipeline(*parts, requires_safety_checker=False)
    return pipe, {**prompts(), **SQUARE}


def sdxl() -> Any:
    """Reads `add_embedding.linear_1.in_features`."""
    module = unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 20,
    )
    parts = (None, None, None, None, None, module, diffusers.DDIMScheduler())
    return diffusers.StableDiffusionXLPipeline(*parts), {**prompts(), **pooled(), **SQUARE}


def perturbed_attention() -> Any:
    """Sets attention processors before its steps, and the old ones after them."""
    parts = (None, None, None, unet(), diffusers.DDIMScheduler(), None, None)
    layers = {"requires_safety_checker": False, "pag_applied_layers": ["down_blocks.1"]}
    return diffusers.StableDiffusionPAGPipeline(*parts, **layers), {**prompts(), **SQUARE}


def controlnet() -> Any:
    """Two models a step."""
    base = unet()
    helper = diffusers.ControlNetModel.from_unet(
        base, conditioning_embedding_out_channels=(4, 4, 8, 8)
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=1,
    )
    helper = models.randomise(helper).eval()
    parts = (vae, None, None, base, helper, diffusers.DDIMScheduler(), None, None)
    pipe = diffusers.StableDiffusionControlNetPipeline(*parts, requires_safety_checker=False)
    return pipe, {**prompts(), "image": noise(1, 3, 64, 64).sigmoid(), **SQUARE}


def animatediff() -> Any:
    module = made(
        "UNetMotionModel",
        **UNET,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        num_attention_heads=2,
        motion_num_attention_heads=2,
    )
    adapter = diffusers.MotionAdapter(
        block_out_channels=(8, 16), motion_layers_per_block=1, motion_norm_num_groups=2
    )
    parts = (None, None, None, module, adapter, diffusers.DDIMScheduler())
    return diffusers.AnimateDiffPipeline(*parts), {**prompts(), "num_frames": 8, **SQUARE}


FAMILIES: dict[str, Family] = {
    make.__name__: make
    for make in (
        flux,
        flux2,
        flux2_klein_kv,
        qwenimage,
        wan,
        wan_of_two,
        ltx,
        sd3,
        cogvideox,
        hunyuandit,
        pixart,
        sana,
        chroma,
        auraflow,
        lumina2,
        cogview4,
        mochi,
        skyreels,
        kandinsky5,
        zimage,
        stable_diffusion,
        sdxl,
        perturbed_attention,
        controlnet,
        animatediff,
    )
}
DENOISERS = ("transformer", "transformer_2", "unet", "controlnet", "prior")


def denoisers(pipe: Any) -> list[str]:
    """The components of a pipeline that may be wrapped."""
    return [name for name in DENOISERS if pipe.components.get(name) is not None]


def run(pipe: Any, call: dict[str, Any]) -> torch.Tensor:
    """The latents that come of a call."""
    pipe.set_progress_bar_config(disable=True)
    torch.manual_seed(0)
    options = {"num_inference_steps": 2, "output_type": "latent", "return_dict": False}
    generator = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipe(**{**options, **call}, generator=generator)[0])
