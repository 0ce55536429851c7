"""What each inherited method does on a stub: answered locally, mirrored to every rank, refused.

A stub inherits all methods of the class it stands for. Those in `LOCAL` only read, and the
driver's own module answers. Those in `MIRRORED` change the module, on the driver and on every
rank, or on none. `HELPERS` compute something from the weights: the driver's module does where it
has them, else rank 0. Those in `IGNORED` are left out. Those in `REFUSED` make no sense on ranks
and say what to do instead. A test walks over everything that torch and diffusers define and fails
where a name is in none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raymod.errors import UnsupportedError

__all__ = ["HELPERS", "IGNORED", "LOCAL", "MIRRORED", "REFUSED", "Mirrored", "refusal"]


@dataclass(frozen=True)
class Mirrored:
    """How a method is mirrored.

    Attributes:
        group: What it changes, for the replay record.
        local: Whether the driver's module is changed too; else the ranks alone.
        supersedes: Whether earlier changes of the group no longer matter.
        recorded: Whether a new gang has to make it again.
    """

    group: str
    local: bool = True
    supersedes: bool = False
    recorded: bool = True


_UNWRAP = "raymod.unwrap the component, change it, and wrap it again"
_DEQUANTIZE = "quantize in raymod.PrepareConfig instead, or call it before raymod.wrap"
_COMPILE = "wrap it with prepare=raymod.PrepareConfig(compile=True) instead"
_TRAINING = "raymod runs inference only; unwrap the component to train it"

REFUSED: dict[str, str] = {
    "compile": _COMPILE,
    "compile_repeated_blocks": _COMPILE,
    "dequantize": _DEQUANTIZE,
    "disable_gradient_checkpointing": _TRAINING,
    "enable_gradient_checkpointing": _TRAINING,
    "enable_parallelism": "raymod splits the module already; see raymod.ParallelConfig",
    "ipu": "use .to(device) instead",
    "mtia": "use .to(device) instead",
    "set_extra_state": _UNWRAP,
    "share_memory": _UNWRAP,
    "smart_apply": _UNWRAP,  # transformers gives it to every module, once it has made a model
    "to_empty": _UNWRAP,
    "type": "use .to(dtype) instead",
}
"""Method -> what to do instead."""

IGNORED: dict[str, str] = {
    "enable_group_offload": "the stub holds nothing on the device that could be offloaded",
}
"""Method -> why it has nothing to do; pipelines call these on all of their components."""

_STRUCTURE = Mirrored("structure")
_ADAPTERS = Mirrored("adapters")
_ATTENTION = Mirrored("attention")

MIRRORED: dict[str, Mirrored] = {
    # dtype and mode; `RemoteModule` defines these itself
    **dict.fromkeys(("bfloat16", "cpu", "cuda", "double", "float", "half"), Mirrored("dtype")),
    **dict.fromkeys(("to", "xpu"), Mirrored("dtype")),
    **dict.fromkeys(("eval", "train"), Mirrored("train", supersedes=True)),
    # weights and structure
    "add_module": _STRUCTURE,
    "apply": _STRUCTURE,
    "load_motion_modules": _STRUCTURE,
    "load_state_dict": _STRUCTURE,
    "register_buffer": _STRUCTURE,
    "register_module": _STRUCTURE,
    "register_parameter": _STRUCTURE,
    "register_to_config": _STRUCTURE,
    "set_submodule": _STRUCTURE,
    # adapters
    "_load_ip_adapter_weights": _ADAPTERS,
    "add_adapter": _ADAPTERS,
    "delete_adapters": _ADAPTERS,
    "disable_adapters": _ADAPTERS,
    "disable_lora": _ADAPTERS,
    "enable_adapters": _ADAPTERS,
    "enable_lora": _ADAPTERS,
    "enable_lora_hotswap": _ADAPTERS,
    "fuse_lora": _ADAPTERS,
    "load_attn_procs": _ADAPTERS,
    "load_lora_adapter": _ADAPTERS,
    "set_adapter": _ADAPTERS,
    "set_adapters": _ADAPTERS,
    "unfuse_lora": _ADAPTERS,
    "unload_lora": _ADAPTERS,
    # attention; a backend need not run on the driver
    "_set_ar_attention": _ATTENTION,
    "disable_npu_flash_attention": _ATTENTION,
    "disable_xformers_memory_efficient_attention": _ATTENTION,
    "disable_xla_flash_attention": _ATTENTION,
    "enable_npu_flash_attention": _ATTENTION,
    "enable_xformers_memory_efficient_attention": _ATTENTION,
    "enable_xla_flash_attention": _ATTENTION,
    "fuse_qkv_projections": _ATTENTION,
    "reset_attention_backend": Mirrored("attention backend", local=False, supersedes=True),
    "set_attention_backend": Mirrored("attention backend", local=False, supersedes=True),
    "set_attention_slice": _ATTENTION,
    "set_attn_processor": _ATTENTION,
    "set_default_attn_processor": _ATTENTION,
    "set_use_memory_efficient_attention_xformers": _ATTENTION,
    "set_use_npu_flash_attention": _ATTENTION,
    "set_use_xla_flash_attention": _ATTENTION,
    "unfuse_qkv_projections": _ATTENTION,
    # caches: the driver's module has none
    "_reset_stateful_cache": Mirrored("cache", local=False, recorded=False),
    "disable_cache": Mirrored("cache", local=False, supersedes=True),
    "enable_cache": Mirrored("cache", local=False, supersedes=True),
    # the rest
    "disable_forward_chunking": Mirrored("chunking", supersedes=True),
    "disable_freeu": Mirrored("freeu", supersedes=True),
    "enable_forward_chunking": Mirrored("chunking", supersedes=True),
    "enable_freeu": Mirrored("freeu", supersedes=True),
    "enable_layerwise_casting": _STRUCTURE,
}
"""Method -> how it is mirrored."""

HELPERS: frozenset[str] = frozenset(
    {
        "_get_pos_embed_from_transformer",
        "get_aug_embed",
        "get_class_embed",
        "get_clip_embeddings",
        "get_time_embed",
        "patchify_and_embed",
        "patchify_and_embed_omni",
        "post_process_latents",
        "process_encoder_hidden_states",
    }
)
"""Methods of single models that pipelines may call, and that read weights."""

LOCAL: frozenset[str] = frozenset(
    {
        # diffusers: reading, saving, and the class's own constructors
        "active_adapters",
        "attn_processors",
        "build_attention_mask",
        "build_rotary_emb_for_absolute_positions",
        "build_token_metadata",
        "cache_context",
        "config",
        "create_coordinate_grid",
        "create_mask",
        "default_attn_processor",
        "device",
        "dtype",
        "encoder_decoder_mask",
        "extract_init_dict",
        "from_config",
        "from_pretrained",
        "freeze_unet2d_params",
        "freeze_unet_params",
        "from_single_file",
        "from_transformer",
        "from_unet",
        "from_unet2d",
        "get_config_dict",
        "get_memory_footprint",
        "get_rotary_pos_embed",
        "get_timestep_ratio_embedding",
        "is_cache_enabled",
        "is_gradient_checkpointing",
        "load_config",
        "num_parameters",
        "patchify",
        "push_to_hub",
        "register_for_auto_class",
        "save_attn_procs",
        "save_config",
        "save_lora_adapter",
        "save_motion_modules",
        "save_pretrained",
        "to_json_file",
        "to_json_string",
        "unpatchify",
        # torch: reading, and hooks around the stub's own call
        "buffers",
        "children",
        "extra_repr",
        "forward",
        "get_buffer",
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "modules",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "register_backward_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "requires_grad_",
        "state_dict",
        "zero_grad",
    }
)
"""Methods and properties of torch and diffusers that the local side answers."""


def refusal(class_name: str, method: str) -> Callable[..., Any]:
    """A method that refuses `method` of `class_name` by name."""
    hint = REFUSED[method]

    def refuse(self: object, *args: object, **kwargs: object) -> Any:
        raise UnsupportedError(
            f"{class_name}.{method}() is not possible while the module runs on raymod's ranks: "
            f"{hint}."
        )

    refuse.__name__ = method
    refuse.__qualname__ = f"{class_name}.{method}"
    refuse.__doc__ = f"Refused on a raymod stub: {hint}."
    return refuse
