"""What each inherited method does on a stub: answered locally, mirrored to every rank, refused.

A stub inherits all methods of the class it stands for. Those that only read answer from the local
side. Those in `MIRRORED` act on the local side and on every rank. Those in `REFUSED` would change
the local side alone, where nothing runs, so they say what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raymod.errors import UnsupportedError

__all__ = ["LOCAL", "MIRRORED", "REFUSED", "refusal"]

_BEFORE = "call it before raymod.wrap: the ranks get the module as it stands then"
_UNWRAP = "raymod.unwrap the component, change it, and wrap it again"
_LORA = "load and fuse adapters before raymod.wrap; changing them afterwards is not available yet"
_CACHE = "step caches on the ranks are not available yet; unwrap to use one locally"
_COMPILE = "compiling on the ranks is not available yet; leave it out, the result is the same"
_OFFLOAD = "the stub holds nothing on the device; call it on the pipeline's other components"
_TRAINING = "raymod runs inference only; unwrap the component to train it"

REFUSED: dict[str, str] = {
    # weights and structure
    "add_module": _UNWRAP,
    "apply": _BEFORE,
    "dequantize": _BEFORE,
    "ipu": "use .to(device) instead",
    "load_state_dict": _UNWRAP,
    "mtia": "use .to(device) instead",
    "register_buffer": _UNWRAP,
    "register_module": _UNWRAP,
    "register_parameter": _UNWRAP,
    "register_to_config": _BEFORE,
    "set_extra_state": _UNWRAP,
    "set_submodule": _UNWRAP,
    "share_memory": _UNWRAP,
    "smart_apply": _BEFORE,
    "to_empty": _UNWRAP,
    "type": "use .to(dtype) instead",
    # adapters
    "add_adapter": _LORA,
    "delete_adapters": _LORA,
    "disable_adapters": _LORA,
    "disable_lora": _LORA,
    "enable_adapters": _LORA,
    "enable_lora": _LORA,
    "enable_lora_hotswap": _LORA,
    "fuse_lora": _LORA,
    "load_attn_procs": _LORA,
    "load_lora_adapter": _LORA,
    "set_adapter": _LORA,
    "set_adapters": _LORA,
    "unfuse_lora": _LORA,
    "unload_lora": _LORA,
    # attention
    "disable_npu_flash_attention": _BEFORE,
    "disable_xformers_memory_efficient_attention": _BEFORE,
    "disable_xla_flash_attention": _BEFORE,
    "enable_npu_flash_attention": _BEFORE,
    "enable_xformers_memory_efficient_attention": _BEFORE,
    "enable_xla_flash_attention": _BEFORE,
    "fuse_qkv_projections": _BEFORE,
    "reset_attention_backend": _BEFORE,
    "set_attention_backend": _BEFORE,
    "set_attention_slice": _BEFORE,
    "set_attn_processor": _BEFORE,
    "set_default_attn_processor": _BEFORE,
    "set_use_memory_efficient_attention_xformers": _BEFORE,
    "set_use_npu_flash_attention": _BEFORE,
    "set_use_xla_flash_attention": _BEFORE,
    "unfuse_qkv_projections": _BEFORE,
    # caches, compile, offload, parallelism
    "compile": _COMPILE,
    "compile_repeated_blocks": _COMPILE,
    "disable_cache": _CACHE,
    "disable_freeu": _BEFORE,
    "enable_cache": _CACHE,
    "enable_forward_chunking": _BEFORE,
    "disable_forward_chunking": _BEFORE,
    "enable_freeu": _BEFORE,
    "enable_group_offload": _OFFLOAD,
    "enable_layerwise_casting": _BEFORE,
    "enable_parallelism": "raymod splits the module already; see raymod.ParallelConfig",
    # training
    "disable_gradient_checkpointing": _TRAINING,
    "enable_gradient_checkpointing": _TRAINING,
}
"""Method -> what to do instead."""

MIRRORED: frozenset[str] = frozenset(
    {"bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "to", "train", "xpu"}
)
"""Methods that `RemoteModule` defines itself: dtype and mode change on every rank."""

LOCAL: frozenset[str] = frozenset(
    {
        # diffusers: reading, saving, and the class's own constructors
        "active_adapters",
        "attn_processors",
        "cache_context",
        "config",
        "device",
        "dtype",
        "extract_init_dict",
        "from_config",
        "from_pretrained",
        "from_single_file",
        "get_config_dict",
        "get_memory_footprint",
        "is_cache_enabled",
        "is_gradient_checkpointing",
        "load_config",
        "num_parameters",
        "push_to_hub",
        "register_for_auto_class",
        "save_attn_procs",
        "save_config",
        "save_lora_adapter",
        "save_pretrained",
        "to_json_file",
        "to_json_string",
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
