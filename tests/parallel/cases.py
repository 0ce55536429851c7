"""What runs on each rank. Called by name from the tests, so it lives in a module of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from raymod.calls.joining import Join, join
from raymod.calls.trees import tensors
from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.parallel import SequenceContext, judge, peers
from raymod.parallel.peers import GroupPeers, Peers
from raymod.prepare import PrepareReport, Share, SplitModule, prepare
from tests import models
from tests.parallel.flops import count
from tests.parallel.plain import Denoiser, Pending

Call = dict[str, Any]
Degree = dict[str, int]


@dataclass
class Seen:
    """What one rank saw in one call."""

    replies: bool
    output: Any
    join: Join | None
    warnings: tuple[str, ...]
    error: str
    runs: int  # forwards of the module, the whole ones for the check included
    tokens: list[int]  # tokens that arrived in the watched module, a number a forward
    whole: Any  # what the module put out before it was split
    report: PrepareReport


def split(
    module: nn.Module,
    degrees: Degree,
    asked: Degree | None = None,
    *,
    threads: int | None = 1,
    extra: Any = None,
    **options: Any,
) -> SplitModule:
    """`module` prepared; `asked` is what the user gave (default: the degrees)."""
    return prepare(
        module,
        degrees=Degrees(**degrees),
        parallel=ParallelConfig(**(degrees if asked is None else asked), **options),
        prepare=PrepareConfig(threads=threads, extra=extra),
        device=torch.device("cpu"),
    )


def family(
    name: str,
    config: dict[str, Any],
    calls: list[dict[str, Any]],
    degrees: Degree,
    asked: Degree | None = None,
    dtype: torch.dtype = torch.float32,
    change: Callable[[nn.Module], None] | None = None,
    late_change: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> list[Seen]:
    """Calls to one of the tiny transformers, on a rank.

    `change` is done to the module before, `late_change` after it was prepared.
    """
    module, make_inputs = models.FAMILIES[name](**config)
    module = module.to(dtype)
    if change is not None:
        change(module)
    inputs = [cast(make_inputs(**call), dtype) for call in calls]
    return watch(module, inputs, degrees, asked, late_change=late_change, **options)


def watch(
    module: nn.Module,
    calls: list[Call],
    degrees: Degree,
    asked: Degree | None = None,
    late_change: Callable[[nn.Module], None] | None = None,
    watched: str | None = None,
    **options: Any,
) -> list[Seen]:
    """Calls to a module; what the rank saw of each."""
    with torch.no_grad():
        wholes = []
        for number, call in enumerate(calls, 1):
            torch.manual_seed(number)
            wholes.append(attempt(lambda call=call: module(**call))[0])
    ready = split(module, degrees, asked, **options)
    if late_change is not None:
        late_change(module)
    runs: list[int] = []
    module.register_forward_pre_hook(lambda *_: runs.append(1))
    tokens: list[int] = []
    if watched is not None:
        inner = module.get_submodule(watched)
        note = lambda _, args, kwargs: tokens.append(first_tensor(args, kwargs).shape[1])  # noqa: E731
        inner.register_forward_pre_hook(note, with_kwargs=True)
    seen = []
    for call, whole in zip(calls, wholes, strict=True):
        runs.clear()
        tokens.clear()
        share, error = attempt(lambda call=call: ready((), call))
        seen.append(
            Seen(
                replies=bool(share and share.replies),
                output=share.output if share else None,
                join=share.join if share else None,
                warnings=share.warnings if share else (),
                error=error,
                runs=len(runs),
                tokens=list(tokens),
                whole=whole,
                report=ready.report,
            )
        )
    return seen


def flops(
    name: str, config: dict[str, Any], call: dict[str, Any], degrees: Degree
) -> tuple[int, int]:
    """Of one call to a tiny transformer: whole, and this rank's."""
    module, make_inputs = models.FAMILIES[name](**config)
    inputs = make_inputs(**call)
    with torch.no_grad():
        whole = count(lambda: module(**inputs))
    ready = split(module, degrees, verify=False)
    return whole, count(lambda: ready((), inputs))


def prepared(*args: Any, **options: Any) -> tuple[PrepareReport | None, str]:
    """The report of a module that was prepared, and what was raised."""
    ready, error = attempt(lambda: split(*args, **options))
    return (ready.report if ready else None), error


def report_of(name: str, degrees: Degree) -> PrepareReport:
    return split(models.FAMILIES[name]()[0], degrees).report


def threads() -> int:
    """Threads of this rank where none were asked for; one again afterwards."""
    report = split(Denoiser(), {"batch_degree": 2}, threads=None).report
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    assert report.threads == used
    return used


def positional(degrees: Degree) -> tuple[Share, torch.Tensor]:
    """A call without keywords: what this rank has, and the whole output."""
    torch.manual_seed(1)
    x, time = torch.randn(3, 7, 8), torch.rand(3)
    module = Denoiser()
    whole = module(x, time).detach()
    share = split(module, degrees)((x, time), {})
    part = slice(0, 2) if torch.distributed.get_rank() == 0 else slice(2, 3)
    torch.testing.assert_close(share.output, whole[part])
    return share, whole


def arguments_after(module: nn.Module, call: Call, degrees: Degree) -> tuple[Any, list[str]]:
    """What a checked call leaves of its arguments."""
    split(module, degrees)((), call)
    return call["x"], list(call["extra"])


def impatient(change: Callable[[nn.Module], None]) -> list[str]:
    """What a rank raises in a call to a tiny Flux whose split run fails on one rank only."""
    judge.MIN_PATIENCE_AFTER_ERROR_S = 2.0
    judge.PATIENCE_AFTER_ERROR_IN_RUNS = 0
    module, make_inputs = models.flux()
    ready = split(module, {"ulysses_degree": 2})
    change(module)
    return [attempt(lambda: ready((), make_inputs(1)))[1]]


def exchanges() -> tuple[list[int], list[float]]:
    """Exchanges of sizes in each of some calls to a tiny Flux, and their differences.

    Rank 0 has five image tokens in all of them, rank 1 four or five.
    """
    module, make_inputs = models.flux()
    inputs = [make_inputs(1, image=image) for image in ((3, 3), (2, 5), (3, 3), (2, 5))]
    with torch.no_grad():
        wholes = [module(**one)[0] for one in inputs]
    ready = split(module, {"ulysses_degree": 2}, verify=False)
    count: list[int] = []
    original = peers.gather_numbers

    def counted(*args: Any) -> Any:
        count.append(1)
        return original(*args)

    peers.gather_numbers = counted
    counts, differences = [], []
    for one, whole in zip(inputs, wholes, strict=True):
        count.clear()
        share = ready((), one)
        counts.append(len(count))
        differences.append((share.output[0] - whole).abs().max().item() if share.replies else 0.0)
    peers.gather_numbers = original
    return counts, differences


def other_sizes_than_before() -> str:
    """What is raised where a second call of equal key has other sizes."""
    context = SequenceContext(torch.distributed.group.WORLD, torch.device("cpu"))
    for tokens in (4, 3):
        with context.on("key"):
            error = attempt(lambda tokens=tokens: context.numbers([tokens]))[1]
    return error


def pending() -> tuple[str, torch.Tensor] | None:
    """The output of a module that does not wait for its own collective; on rank 0."""
    share = split(Pending(), {"batch_degree": 2}, verify=False)((), {"x": torch.ones(1, 5)})
    if not share.replies:
        return None
    output = share.output["gathered"]
    return type(output).__name__, output.clone()


def runs_after_forget() -> list[int]:
    """Forwards in each of four calls, with everything forgotten after two."""
    module = Denoiser()
    ready = split(module, {"batch_degree": 2})
    runs: list[int] = []
    module.register_forward_pre_hook(lambda *_: runs.append(1))
    counts = []
    for number in range(4):
        if number == 2:
            with ready.unsplit():
                pass
        runs.clear()
        ready((), {"x": torch.ones(4, 3, 8), "time": torch.ones(4)})
        counts.append(len(runs))
    return counts


class Adapted(nn.Module):
    """A layer with something added, as adapters do; what the layer's own hooks did not see."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.added = nn.Linear(layer.in_features, layer.out_features)
        models.randomise(self.added, seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.added(x)


def changed_while_split() -> list[tuple[Any, torch.Tensor, int]]:
    """A module changed and changed back: output, that of the whole one, image tokens of a rank."""
    module, make_inputs = models.FAMILIES["flux"]()
    whole, _ = models.FAMILIES["flux"]()
    layer, plain_layer = module.proj_out, whole.proj_out
    ready = split(module, {"ulysses_degree": 2})
    inputs = make_inputs(1)
    tokens: list[int] = []
    note = lambda _, args, kwargs: tokens.append(kwargs["hidden_states"].shape[1])  # noqa: E731
    module.transformer_blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    found = []
    for replaced, other in (
        (layer, plain_layer),
        (Adapted(layer), Adapted(plain_layer)),
        (layer, plain_layer),
    ):
        with ready.unsplit() as inner:
            inner.proj_out = replaced
        whole.proj_out = other
        with torch.no_grad():
            expected = whole(**inputs)[0]
        for _ in range(2):
            share = ready((), inputs)
        found.append((share.output, expected, tokens[-1]))
    return found


def neighbour(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a module that is not split, before and after another one was."""
    module, make_inputs = models.FAMILIES[name](seed=3)
    inputs = make_inputs(2)
    with torch.no_grad():
        before = module(**inputs)[0]
        other, make_others = models.FAMILIES[name]()
        split(other, {"ulysses_degree": 2})((), make_others(1))
        return before, module(**inputs)[0]


def attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return function(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def first_tensor(*values: Any) -> torch.Tensor:
    return next(tensors(values))


def cast(inputs: Call, dtype: torch.dtype) -> Call:
    def change(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: change(value) for name, value in inputs.items()}


# -- what follows runs in the test's own process --


def whole_output(seen: Sequence[Seen]) -> Any:
    """What the driver makes of the ranks' replies."""
    replies = [one for one in seen if one.replies]
    how = replies[0].join
    return replies[0].output if how is None else join([one.output for one in replies], how)


def largest_difference(whole: Any, other: Any) -> float:
    """Over all tensors of two outputs of one type, relative to the largest entry of each."""
    assert type(whole) is type(other)
    ones, shape = tree_flatten(whole)
    others, other_shape = tree_flatten(other)
    assert shape == other_shape
    worst = 0.0
    for one, two in zip(ones, others, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        assert not two.isnan().any()
        scale = max(1.0, one.abs().max().item())
        worst = max(worst, (one.double() - two.double()).abs().max().item() / scale)
    return worst


def buffers_after(module: nn.Module, calls: list[Call], degrees: Degree, **options: Any) -> Any:
    """Errors and buffers after some calls on ranks, and buffers after the same calls without."""
    module, local = copy.deepcopy(module), copy.deepcopy(module)  # what arrives shares its memory
    with torch.no_grad():
        for call in calls:
            local(**call)
    ready = split(module, degrees, **options)
    errors = [attempt(lambda call=call: ready((), call))[1] for call in calls]
    found = ({k: v.clone() for k, v in one.named_buffers()} for one in (module, local))
    return errors, *found


def exchanged(own: Peers) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Parts of uneven sizes put together, and numbers."""
    part = torch.full((2, 1 + own.rank, 3), float(own.rank))
    return own.gather(part, 1), own.numbers([own.rank, 10 + own.rank])


def exchanged_by_group() -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """The same over a process group; the second time what is known is not asked for again."""
    own = GroupPeers(torch.distributed.group.WORLD, torch.device("cpu"))
    with own.on("key"):
        first = exchanged(own)
    own.group = None  # type: ignore[assignment]  # what would be asked
    with own.on("key"):
        assert own.shapes(torch.ones(2, 1 + own.rank, 3)) == [(2, 1, 3), (2, 2, 3)]
    return first
