"""Step caches on ranks, beside the same on a whole local model; run on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import nn

from raymod.calls.joining import join
from raymod.calls.values import TravelledValue, arrived
from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.prepare import prepare
from tests import models

STEPS = 8
TIMESTEP = TravelledValue("timestep")

CONFIGS: dict[str, Callable[[], Any]] = {
    "first block": lambda: diffusers.FirstBlockCacheConfig(threshold=0.35),
    "magnitudes": lambda: diffusers.MagCacheConfig(
        threshold=0.3, num_inference_steps=STEPS, mag_ratios=[1 + 0.05 * i for i in range(STEPS)]
    ),
    "taylor": lambda: diffusers.TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    ),
    "taylor lite": lambda: diffusers.TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=2,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=True,
    ),
    "pyramid": lambda: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=TIMESTEP,
    ),
    "faster": lambda: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_block_identifiers=("blocks",),
        unconditional_batch_skip_range=3,
        tensor_format="BCFHW",
        current_timestep_callback=TIMESTEP,
    ),
    "faster distilled": lambda: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_block_identifiers=("blocks",),
        is_guidance_distilled=True,
        current_timestep_callback=TIMESTEP,
    ),
    "sea": lambda: diffusers.SeaCacheConfig(threshold=0.5),
}


def run(
    family: str,
    config: str,
    degrees: dict[str, int],
    *,
    batch: int = 1,
    asked: bool = True,
    contexts: tuple[str, ...] = ("cond", "uncond"),
    sabotage: Callable[[nn.Module], None] | None = None,
    compile_with: str | None = None,
) -> dict[str, Any]:
    """A short denoising, with a cache, on this rank and on a local model; what came of both."""
    overrides = {"out_channels": 5} if config == "sea" else {}
    module, make_inputs = models.FAMILIES[family](**overrides)
    local = copy.deepcopy(module)
    local.enable_cache(CONFIGS[config]())
    ready = prepare(
        module,
        degrees=Degrees(**degrees),
        parallel=ParallelConfig(**(degrees if asked else {"workers": 2})),
        prepare=PrepareConfig(
            threads=1,
            cache=CONFIGS[config](),
            compile={"backend": compile_with} if compile_with else False,
        ),
        device=torch.device("cpu"),
    )
    if sabotage is not None:
        sabotage(ready.module)
    shares, wholes, warnings = [], [], []
    counts = {"local": [], "rank": []}
    counters = {"local": _count(local), "rank": _count(ready.module)}
    for number in range(STEPS):
        sigma = 1 - number / STEPS
        arrived({"timestep": 1000 * sigma})
        for seed, name in enumerate(contexts):
            call = _call(make_inputs, batch, number, seed)
            fields = {"step_index": number, "num_inference_steps": STEPS, "sigma": sigma}
            for side, model in (("local", local), ("rank", ready.module)):
                before = len(counters[side])
                with model.cache_context(name, **fields), torch.no_grad():
                    if side == "local":
                        wholes.append(model(**copy.deepcopy(call)))
                    else:
                        share = ready((), call)
                        shares.append((share.replies, share.output, share.join))
                        warnings.extend(share.warnings)
                counts[side].append(len(counters[side]) - before)
    return {"shares": shares, "wholes": wholes, "counts": counts, "warnings": warnings}


def _call(make_inputs: Any, batch: int, number: int, seed: int) -> dict[str, Any]:
    """Inputs that change from step to step, a little more each, and not alike for all tokens."""
    call = make_inputs(batch, seed=seed + 1)
    hidden = call["hidden_states"]
    drift = torch.linspace(0, 1, hidden.numel()).reshape(hidden.shape) ** 3
    call["hidden_states"] = hidden + drift * number * number / STEPS
    call["timestep"] = call["timestep"] * (1 - number / 40)
    return call


def _count(module: nn.Module) -> list[int]:
    """A list that grows whenever a query projection runs."""
    seen: list[int] = []
    for name, part in module.named_modules():
        if name.endswith("to_q"):
            part.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


def joined(seen: list[dict[str, Any]]) -> list[Any]:
    """The outputs of all ranks, put together."""
    outputs = []
    for number in range(len(seen[0]["shares"])):
        parts = [one["shares"][number] for one in seen]
        replies = [output for answers, output, _ in parts if answers]
        how = next(how for answers, _, how in parts if answers)
        outputs.append(replies[0] if how is None else join(replies, how))
    return outputs


def decide_alone(module: nn.Module) -> None:
    """The fault: each rank decides from its own tokens."""
    for part in module.modules():
        for hook in getattr(getattr(part, "_diffusers_hook", None), "hooks", {}).values():
            vars(hook).pop("_should_compute_remaining_blocks", None)
