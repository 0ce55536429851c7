"""The sequence plan a module brings along: which tensors are cut along their tokens, and where.

diffusers' models say it in their class attribute `_cp_plan`; a module of one's own can say it the
same way, with diffusers' `ContextParallelInput` and `ContextParallelOutput` or anything with the
same attributes. Reading it imports neither diffusers nor torch.distributed and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from raymod.errors import ConfigError

__all__ = ["Cut", "Gather", "SequencePlan", "by_batch_only", "resolve", "sequence_plan"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One tensor that is cut along its tokens, each rank keeping its own.

    Attributes:
        path: Path of the module; `*` stands for every child.
        argument: Name of the argument of its forward that is cut, or None to cut an output.
        output: Index of the output that is cut, or None to cut an argument.
        element: Where the argument is a list of tensors: the index in it.
        dim: The dim of the tokens.
        ndim: The tensor is cut only if it has this many dims. None: always.
    """

    path: str
    argument: str | None = None
    output: int | None = None
    element: int | None = None
    dim: int
    ndim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gather:
    """One output that is put together again from the tokens of all ranks.

    Attributes:
        path: Path of the module; `*` stands for every child.
        output: Index of the output.
        outputs: Number of outputs the plan speaks of.
        dim: The dim of the tokens.
    """

    path: str
    output: int = 0
    outputs: int = 1
    dim: int


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Where a module is cut along the sequence.

    Attributes:
        source: Where the plan is from, as `FluxTransformer2DModel._cp_plan`.
        cuts: What is cut.
        gathers: What is put together again.
        heads: Number of attention heads, if the module's config says so.
    """

    source: str
    cuts: tuple[Cut, ...]
    gathers: tuple[Gather, ...]
    heads: int | None = None


def by_batch_only(module: nn.Module) -> str:
    """What to tell of a module without a plan whose split was left to raymod."""
    return (
        f"{type(module).__name__} does not say where its sequence can be cut (it has no _cp_plan): "
        f"calls are divided by batch only, and a call with a batch of 1 is not divided"
    )


def sequence_plan(module: nn.Module) -> SequencePlan | None:
    """The plan in `module._cp_plan`, or None if it has none.

    Raises:
        ConfigError: The plan is malformed, or names modules that `module` does not have.
    """
    given = getattr(module, "_cp_plan", None)
    if given is None:
        return None
    source = f"{type(module).__name__}._cp_plan"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source} must map module paths to cuts, not be {_type(given)}")
    cuts: list[Cut] = []
    gathers: list[Gather] = []
    for path, entry in given.items():
        if not isinstance(path, str):
            raise ConfigError(f"{source}: {path!r} must be a module path")
        resolve(module, path, source=source)
        if isinstance(entry, Mapping):
            cuts.extend(_cuts(path, entry, source))
        else:
            gathers.extend(_gathers(path, entry, source))
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return SequencePlan(
        source=source,
        cuts=tuple(cuts),
        gathers=tuple(gathers),
        heads=heads if isinstance(heads, int) else None,
    )


def resolve(module: nn.Module, path: str, *, source: str = "the plan") -> list[nn.Module]:
    """The submodules that `path` names: one, or several where it has a `*`.

    An index beyond the end of a list names nothing: plans are written for the largest size of a
    model.

    Raises:
        ConfigError: A name in `path` is no submodule.
    """
    found = [module]
    for name in path.split(".") if path else ():
        found = [child for parent in found for child in _children(parent, name, path, source)]
    return found


def _children(parent: nn.Module, name: str, path: str, source: str) -> Iterator[nn.Module]:
    children = dict(parent.named_children())
    if name == "*":
        yield from children.values()
    elif name in children:
        yield children[name]
    elif not (name.isdigit() and isinstance(parent, (nn.ModuleList, nn.Sequential))):
        raise ConfigError(
            f"{source} names {path!r}, but {type(parent).__name__} has no submodule {name!r}"
        )


def _cuts(path: str, entry: Mapping[Any, Any], source: str) -> Iterator[Cut]:
    for key, spec in entry.items():
        where = f"{source}[{path!r}][{key!r}]"
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ConfigError(f"{where}: a cut is named by an argument or by an output's index")
        specs = list(enumerate(spec)) if isinstance(spec, (list, tuple)) else [(None, spec)]
        for element, one in specs:
            dim, ndim = _whole(one, "split_dim", where), _whole(one, "expected_dims", where, None)
            of_output = bool(getattr(one, "split_output", False))
            if of_output != isinstance(key, int) or (of_output and element is not None):
                raise ConfigError(
                    f"{where}: cut an argument by its name and split_output=False, an output by "
                    f"its index and split_output=True"
                )
            if isinstance(key, int):
                yield Cut(path=path, output=key, dim=dim or 0, ndim=ndim)
            else:
                yield Cut(path=path, argument=key, element=element, dim=dim or 0, ndim=ndim)


def _gathers(path: str, entry: Any, source: str) -> Iterator[Gather]:
    entries = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    for index, one in enumerate(entries):
        if one is not None:
            dim = _whole(one, "gather_dim", f"{source}[{path!r}]")
            yield Gather(path=path, output=index, outputs=len(entries), dim=dim or 0)


_REQUIRED = object()


def _whole(spec: Any, name: str, where: str, default: Any = _REQUIRED) -> int | None:
    value = getattr(spec, name, default)
    if value is None and default is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        what = f"{_type(spec)} has no {name}" if value is _REQUIRED else f"{name}={value!r}"
        raise ConfigError(f"{where}: {what}; {name} must be an integer")
    return value


def _type(value: object) -> str:
    return type(value).__name__
