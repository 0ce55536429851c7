"""Faults planted into a module: plans that are wrong, and splits that do not reach a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Change = Callable[[nn.Module], None]


def cut(dim: int, ndim: int | None = None, of_output: bool = False) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelInput

    return ContextParallelInput(split_dim=dim, expected_dims=ndim, split_output=of_output)


def gather(dim: int) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelOutput

    return ContextParallelOutput(gather_dim=dim)


def replan(module: nn.Module, **changes: Any) -> None:
    """Change `module`'s plan: `path__argument=new` or `path=new`; None takes the entry out.

    `root` is the path of the module itself, and `_` in a path stands for a dot.
    """
    plan = {path: dict(e) if isinstance(e, dict) else e for path, e in module._cp_plan.items()}
    for name, new in changes.items():
        path, _, argument = name.partition("__")
        path = "" if path == "root" else path
        key: Any = int(argument) if argument.isdigit() else argument
        holder, key = (plan[path], key) if argument else (plan, path)
        if new is None:
            del holder[key]
        else:
            holder[key] = new
    module._cp_plan = plan


def text_left_whole(module: nn.Module) -> None:
    """Every rank has all the text: its keys count twice."""
    replan(module, root__encoder_hidden_states=None, root__txt_ids=None)


def positions_left_whole(module: nn.Module) -> None:
    replan(module, root__img_ids=None)


def gathered_along_channels(module: nn.Module) -> None:
    replan(module, proj_out=gather(2))


def gathered_along_samples(module: nn.Module) -> None:
    replan(module, proj_out=gather(0))


def not_gathered(module: nn.Module) -> None:
    replan(module, proj_out=None)


def cut_along_channels(module: nn.Module) -> None:
    replan(module, root__hidden_states=cut(2, 3))


def cut_for_other_dims(module: nn.Module) -> None:
    """Matches nothing: the tensors have three dims."""
    replan(module, root__hidden_states=cut(1, 4), root__img_ids=cut(0, 4))


def half_of_the_rope(module: nn.Module) -> None:
    replan(module, rope__1=None)


def rope_left_whole(module: nn.Module) -> None:
    replan(module, rope=None)


def cut_a_block_late(module: nn.Module) -> None:
    plan = module._cp_plan
    module._cp_plan = {"rope": plan["rope"], "proj_out": plan["proj_out"]} | {
        "blocks.1": plan["blocks.0"]
    }


def text_mask_left_whole(module: nn.Module) -> None:
    plan = {path: entry for path, entry in module._cp_plan.items() if "*" not in path}
    module._cp_plan = plan


def no_cut_for_text_positions(module: nn.Module) -> None:
    replan(module, pos_embed__1=None)


def _processors(module: nn.Module) -> list[Any]:
    return [child.processor for child in module.modules() if hasattr(child, "processor")]


def one_attention_left_out(module: nn.Module) -> None:
    _processors(module)[0]._parallel_config = None


def all_attentions_left_out(module: nn.Module) -> None:
    for processor in _processors(module):
        processor._parallel_config = None


def mask_forgotten(module: nn.Module) -> None:
    """Attention forgets its mask where it is split, which shows only once something is masked."""

    def forget(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if attention.processor._parallel_config.active:
            kwargs["encoder_hidden_states_mask"] = None
        return args, kwargs

    attention = module.transformer_blocks[0].attn
    attention.register_forward_pre_hook(forget, with_kwargs=True)


def fails_on_rank_one(module: nn.Module) -> None:
    """In the second run, the split one, with the other rank already on its way."""
    runs: list[int] = []

    def fail(*_: Any) -> None:
        runs.append(1)
        if len(runs) == 2 and torch.distributed.get_rank() == 1:
            raise ArithmeticError("only here")

    module.proj_out.register_forward_pre_hook(fail)


def keep_in_fp32(module: nn.Module) -> None:
    """What diffusers keeps in fp32 when it loads the model in another dtype."""
    for name, parameter in module.named_parameters():
        if set(module._keep_in_fp32_modules) & set(name.split(".")):
            parameter.data = parameter.data.float()


BEFORE: dict[str, list[Change]] = {
    "flux": [
        text_left_whole,
        positions_left_whole,
        gathered_along_channels,
        gathered_along_samples,
        not_gathered,
        cut_along_channels,
        cut_for_other_dims,
    ],
    "flux2": [text_left_whole, not_gathered],
    "wan": [half_of_the_rope, rope_left_whole, cut_a_block_late, gathered_along_channels],
    "qwenimage": [text_mask_left_whole, no_cut_for_text_positions, not_gathered],
    "ltx": [half_of_the_rope, rope_left_whole],
}
AFTER: dict[str, list[Change]] = {
    name: [one_attention_left_out, all_attentions_left_out]
    for name in ("flux", "flux2", "wan", "qwenimage", "ltx")
}
