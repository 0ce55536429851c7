"""What of a module must not travel to the ranks, and what it must not have.

The user's module is never changed: the parts are left out of the copy while it is pickled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

from torch import nn

from raymod.errors import UnsupportedError, WeightsError

__all__ = ["check_module", "without_hooks"]

# accelerate's hooks that only move tensors between devices, which is not the copy's business
_PLACING_HOOKS = {"AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook", "ModelHook"}

# what accelerate and diffusers keep on a module for their hooks and its placement
_HOOK_STATE = ("_hf_hook", "_old_forward", "_diffusers_hook", "hf_device_map")

# accelerate wraps these to warn about moving a module that it has placed
_WRAPPED_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron")

_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_CASTING_ADVICE = (
    "its layers are stored in another dtype than they compute in. Wrap it without "
    "enable_layerwise_casting."
)
# diffusers' hooks, by the beginning of their names, and what takes them off
_ADVICE = {
    "group_offloading": (
        "it is offloaded in groups. Wrap it without enable_group_offload: the ranks hold the "
        "weights, so there is nothing to offload here."
    ),
    "layer_execution_tracker": "it is offloaded in groups. Wrap it without enable_group_offload.",
    "lazy_prefetch_group": "it is offloaded in groups. Wrap it without enable_group_offload.",
    "layerwise_casting": _CASTING_ADVICE,
    "peft_autocast_disable": _CASTING_ADVICE,
    "cp_": (
        "it has been parallelised already (enable_parallelism). Wrap a fresh one; raymod splits "
        "it on the ranks."
    ),
}
_CACHE_ADVICE = "a cache is on. Call {root}.disable_cache() before you wrap it."
_OTHER_ADVICE = "Take the hook off before you wrap it."


def check_module(module: nn.Module, elsewhere: Container[int] = ()) -> tuple[str, ...]:
    """Refuse a module that cannot be shipped.

    Args:
        module: The module.
        elsewhere: The ids of tensors that need no data here.

    Returns:
        What the user should know about the copy on the ranks.

    Raises:
        WeightsError: Weights without data, or hooks that cannot travel.
        UnsupportedError: The result of `torch.compile`.
    """
    root = type(module).__name__
    for name, part in module.named_modules(prefix=root):
        if type(part).__name__ == "OptimizedModule":
            raise UnsupportedError(
                f"{name} is the result of torch.compile; compiled code does not travel. Give the "
                f"module from before (its _orig_mod)."
            )
        _check_hf_hook(name, part)
        _check_diffusers_hook(name, part, root)
    _check_data(module, root, elsewhere)
    return tuple(_warnings(module))


def without_hooks(root: nn.Module) -> Callable[[Any], Any]:
    """A reducer for `take_apart` that leaves out the hooks which stay with the driver.

    These are accelerate's placing hooks everywhere, and the forward hooks of `root` itself, which
    go on running on its stub.
    """

    def reduce(obj: Any) -> Any:
        if not isinstance(obj, nn.Module):
            return NotImplemented
        reduced = obj.__reduce_ex__(5)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        state = _without_hook_state(obj, reduced[2])
        if obj is root:
            state.update((name, OrderedDict()) for name in _FORWARD_HOOKS if name in state)
        return (*reduced[:2], state, *reduced[3:])

    return reduce


def _without_hook_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in state.items() if name not in _HOOK_STATE}
    if "_old_forward" in state:
        kept["forward"] = state["_old_forward"]
    # the class's own forward, which a hook's removal leaves behind as an attribute
    if getattr(kept.get("forward"), "__func__", None) is type(module).forward:
        del kept["forward"]
    for name in _WRAPPED_MOVES:
        if getattr(getattr(kept.get(name), "__wrapped__", None), "__self__", None) is module:
            del kept[name]
    return kept


def _check_hf_hook(name: str, module: nn.Module) -> None:
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        kind = type(part).__name__
        if part is not None and kind not in _PLACING_HOOKS:
            raise WeightsError(
                f"{name} has a hook of accelerate that raymod does not know ({kind}). Take it off "
                f"before you wrap it: accelerate.hooks.remove_hook_from_module(module, "
                f"recurse=True)."
            )


def _check_diffusers_hook(name: str, module: nn.Module, root: str) -> None:
    registry = getattr(module, "_diffusers_hook", None)
    for hook in getattr(registry, "hooks", {}):
        advice = next((text for begin, text in _ADVICE.items() if hook.startswith(begin)), None)
        if advice is None:
            cached = any(word in hook for word in ("cache", "broadcast", "fbc_"))
            advice = (_CACHE_ADVICE if cached else _OTHER_ADVICE).format(root=root)
        raise WeightsError(f"{name} has the diffusers hook {hook!r}: {advice}")


def _check_data(module: nn.Module, root: str, elsewhere: Container[int]) -> None:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    missing = [name for name, tensor in tensors if tensor.is_meta and id(tensor) not in elsewhere]
    if not missing:
        return
    hooked = any(hasattr(part, "_hf_hook") for part in module.modules())
    raise WeightsError(
        f"{len(missing)} of {len(tensors)} weights of {root} have no data (they are on the meta "
        f"device), {missing[0]!r} for one. "
        + (
            "accelerate has offloaded them: call pipe.remove_all_hooks() first, or wrap before "
            "you enable offloading."
            if hooked
            else "Load them first, or let the ranks do it: weights= the checkpoint's path, or a "
            "function: weights=lambda: Cls.from_pretrained(path)."
        )
    )


def _warnings(module: nn.Module) -> list[str]:
    texts = []
    hooked = [
        name
        for name, part in module.named_modules()
        if part is not module and (part._forward_hooks or part._forward_pre_hooks)
    ]
    if hooked:
        texts.append(
            f"the forward hooks of {len(hooked)} submodules ({hooked[0]}, ...) run on the ranks "
            f"from now on, as copies: what they record stays there"
        )
    if any(getattr(part, "_compiled_call_impl", None) for part in module.modules()):
        texts.append("module.compile() does not travel: the ranks run it uncompiled")
    return texts
