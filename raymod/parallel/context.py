"""The sequence split of one module: tokens are cut on the way in and gathered on the way out.

In between each rank runs the model's own code on its own tokens; only attention needs the tokens
of the others (`attention.py`). Everything hangs on one flag: while a
[`SequenceContext`][raymod.parallel.SequenceContext] is off, the module computes as if it had never
been split.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from raymod.errors import ConfigError, SplitError
from raymod.parallel.attention import install
from raymod.parallel.mesh import Mesh
from raymod.parallel.sequence import SequenceContext
from raymod.plans import Cut, Gather, SequencePlan, resolve

__all__ = ["apply_context", "place", "remove"]


def apply_context(module: nn.Module, plan: SequencePlan, mesh: Mesh) -> SequenceContext:
    """Split `module` by sequence over the mesh's ring and ulysses axes; off until switched on.

    Args:
        module: The module, changed in place: hooks are placed, attention processors get the
            context.
        plan: Where it is cut.
        mesh: With more than one rank to a sequence.

    Raises:
        ConfigError: Nothing in the module matches the plan.
    """
    context = SequenceContext.of(mesh)
    place(module, plan, context)
    return context


def place(module: nn.Module, plan: SequencePlan, context: SequenceContext) -> None:
    """Put the cuts and gathers of `plan` into `module`; `remove` takes them off.

    Raises:
        ConfigError: Nothing in the module matches the plan.
    """
    context.hooks = 0
    for path in dict.fromkeys(cut.path for cut in plan.cuts):
        cuts = [cut for cut in plan.cuts if cut.path == path]
        for target in resolve(module, path, source=plan.source):
            context.hooks += _place_cuts(target, cuts, context)
    for path in dict.fromkeys(one.path for one in plan.gathers):
        gathers = [one for one in plan.gathers if one.path == path]
        for target in resolve(module, path, source=plan.source):
            context.hooks += _place_gathers(target, gathers, context)
    if context.hooks == 0:
        raise ConfigError(
            f"{plan.source} matches nothing in this {type(module).__name__}: no cut and no gather "
            f"could be placed. Use batch_degree, or mend the plan."
        )
    context.attentions = _enter_attention(module, context)
    if context.attentions:
        install()


def remove(context: SequenceContext) -> None:
    """Take everything off the module that `place` put there. Twice is not worse."""
    while context.undo:
        context.undo.pop()()


def _enter_attention(module: nn.Module, context: SequenceContext) -> int:
    """Hand `context` to whatever passes a `_parallel_config` to diffusers' attention dispatch."""
    found: set[int] = set()
    for child in module.modules():
        for carrier in (getattr(child, "processor", None), None if child is module else child):
            if carrier is not None and hasattr(carrier, "_parallel_config"):
                if id(carrier) not in found:
                    context.undo.append(partial(setattr, carrier, "_parallel_config", None))
                carrier._parallel_config = context
                found.add(id(carrier))
    return len(found)


def _place_cuts(target: nn.Module, cuts: Sequence[Cut], context: SequenceContext) -> int:
    arguments = {cut.argument: cut for cut in cuts if cut.argument and cut.element is None}
    lists: dict[str, dict[int, Cut]] = {}
    for cut in cuts:
        if cut.argument and cut.element is not None:
            lists.setdefault(cut.argument, {})[cut.element] = cut
    outputs = {cut.output: cut for cut in cuts if cut.output is not None}
    parameters = _parameters(target)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not context.active:
            return None
        positional, named = list(args), dict(kwargs)
        for name in [*arguments, *lists]:
            holder: Any = named
            key: Any = name
            if name not in named:
                holder, key = positional, parameters.index(name) if name in parameters else -1
                if not 0 <= key < len(positional):
                    continue  # left out: the default holds
            if name in arguments and isinstance(holder[key], torch.Tensor):
                holder[key] = context.cut(holder[key], arguments[name])
            elif name in lists and isinstance(holder[key], (list, tuple)):
                holder[key] = _cut_list(holder[key], lists[name], context)
            elif holder[key] is not None:
                raise SplitError(f"the plan cannot cut {name}: it is {type(holder[key]).__name__}")
        return tuple(positional), named

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if not context.active:
            return None
        cut_output = lambda tensor, index: context.cut(tensor, outputs[index])  # noqa: E731
        return _changed(output, outputs, cut_output)

    if arguments or lists:
        context.undo.append(target.register_forward_pre_hook(before, with_kwargs=True).remove)
    if outputs:
        context.undo.append(target.register_forward_hook(after).remove)
    return len(cuts)


def _place_gathers(target: nn.Module, gathers: Sequence[Gather], context: SequenceContext) -> int:
    by_output = {one.output: one for one in gathers}

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if not context.active:
            return None
        join = lambda tensor, index: context.gather(tensor, by_output[index].dim)  # noqa: E731
        return _changed(output, by_output, join)

    context.undo.append(target.register_forward_hook(after).remove)
    return len(gathers)


def _cut_list(values: Sequence[Any], cuts: Mapping[int, Cut], context: SequenceContext) -> Any:
    def cut(index: int, value: Any) -> Any:
        wanted = index in cuts and isinstance(value, torch.Tensor)
        return context.cut(value, cuts[index]) if wanted else value

    return type(values)(cut(index, value) for index, value in enumerate(values))  # type: ignore[call-arg]


def _changed(output: Any, wanted: Mapping[int, Any], change: Any) -> Any:
    """`output` with the tensors at the indices in `wanted` changed; of the same type."""
    if isinstance(output, torch.Tensor):
        if list(wanted) != [0]:
            raise SplitError(f"the plan speaks of outputs {sorted(wanted)}, but there is one only")
        return change(output, 0)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [f.name for f in dataclasses.fields(output)]
        values = [getattr(output, name) for name in names]
        return type(output)(**dict(zip(names, _changed(values, wanted, change), strict=True)))
    if not isinstance(output, (list, tuple)):
        raise SplitError(f"the plan cannot take outputs from {type(output).__name__}")
    if max(wanted) >= len(output):
        raise SplitError(f"the plan speaks of output {max(wanted)}, but there are {len(output)}")
    values = list(output)
    for index in wanted:
        if isinstance(values[index], torch.Tensor):
            values[index] = change(values[index], index)
    if hasattr(output, "_fields"):
        return type(output)(*values)
    return type(output)(values)


def _parameters(target: nn.Module) -> list[str]:
    """Names of the parameters of the module's forward, `self` left out."""
    kind: Any = type(getattr(target, "_orig_mod", target))
    return list(inspect.signature(kind.forward).parameters)[1:]
