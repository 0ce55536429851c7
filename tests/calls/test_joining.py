"""Parts of a batch become one output of the right type."""

from __future__ import annotations

import itertools
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from raymod.calls.joining import Join, find_join, guess_join, join, take

B = 5


class Pair(NamedTuple):
    one: torch.Tensor
    two: Any


@dataclass
class Output:
    sample: torch.Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    sample: torch.Tensor


def x(*shape: int) -> torch.Tensor:
    return torch.arange(torch.tensor(shape).prod().item()).reshape(shape).float()


WHOLES: dict[str, Any] = {
    "tensor": x(B, 3),
    "square": x(B, B),
    "second dim": x(2, B, 3),
    "merged with frames": x(B * 4, 3),
    "tuple": (x(B, 2), x(B)),
    "tuple of one": (x(B, 2),),
    "list of tensors": [x(B, 2), x(B, 3)],
    "list of samples": [x(2, n) for n in range(1, B + 1)],
    "named tuple": Pair(x(B, 2), None),
    "dict": {"a": x(B), "b": {"c": [x(B, 1)]}},
    "ordered dict": OrderedDict(z=x(B), a=x(B, 2)),
    "dataclass": Output(x(B, 2), {"note": "n", "scale": 0.5, "shape": (1, 2)}),
    "frozen dataclass": Frozen(x(B, 2)),
    "with what all share": {"x": x(B), "positions": x(7, 2), "none": None},
    "integers": torch.arange(B),
    "booleans": torch.arange(B) > 2,
    "arrays": (x(B, 3).numpy(), x(2, B, 3).numpy(), x(7).numpy()),
    "nothing": None,
}


def first_dim(value: Any, start: int, stop: int) -> Any:
    """The part of `value`, found by hand."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.shape[:2] == (2, B):
            return value[:, start:stop]
        if value.ndim and value.shape[0] % B == 0:
            each = value.shape[0] // B
            return value[start * each : stop * each]
        return value
    if isinstance(value, list) and len(value) == B:
        return value[start:stop]
    if isinstance(value, Pair):
        return Pair(*[first_dim(v, start, stop) for v in value])
    if isinstance(value, (list, tuple)):
        return type(value)(first_dim(v, start, stop) for v in value)
    if isinstance(value, dict):
        return type(value)((k, first_dim(v, start, stop)) for k, v in value.items())
    if isinstance(value, (Output, Frozen)):
        return type(value)(**{k: first_dim(v, start, stop) for k, v in vars(value).items()})
    return value


def assert_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, two, strict=True)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, (Output, Frozen)):
        assert_same(vars(one), vars(two))
    else:
        assert one == two


@pytest.mark.parametrize("whole", WHOLES.values(), ids=WHOLES)
@pytest.mark.parametrize("ends", [(0, 3, 5), (0, 1, 2, 5), (0, 4, 5)])
def test_there_and_back(whole: Any, ends: tuple[int, ...]) -> None:
    spans = list(itertools.pairwise(ends))
    parts = [first_dim(whole, *span) for span in spans]
    found = {
        find_join(whole, part, batch=B, own=stop - start)
        for part, (start, stop) in zip(parts, spans, strict=True)
    }
    assert len(found) == 1  # every rank finds the same
    (how,) = found
    assert how is not None
    assert_same(join(parts, pickle.loads(pickle.dumps(how))), whole)
    for part, (start, stop) in zip(parts, spans, strict=True):
        assert_same(take(whole, how, start=start, stop=stop, batch=B), part)


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        (x(B, 3), x(2, 4)),
        (x(B, 3), x(3, 3)),
        (x(B, 3), x(2, 3).double()),
        (x(B, 3), x(2, 3, 1)),
        (x(B, 3), [x(2, 3)]),
        ((x(B),), (x(2), x(2))),
        ({"a": x(B)}, {"b": x(2)}),
        ({"a": 1}, {"a": 2}),
        (Output(x(B)), Output(x(2), 1)),
        (x(6, 3), x(2, 3)),
    ],
)
def test_what_does_not_fit(whole: Any, part: Any) -> None:
    assert find_join(whole, part, batch=B, own=2) is None


@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("name", ["tensor", "tuple", "tuple of one", "list of samples", "dict"])
def test_a_guess_without_the_whole(name: str, own: int) -> None:
    whole = WHOLES[name]
    parts = [first_dim(whole, 0, own), first_dim(whole, own, B)]
    assert_same(join(parts, guess_join(parts[0], own=own)), whole)


def test_diffusers_outputs() -> None:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    whole = Transformer2DModelOutput(sample=x(B, 3))
    parts = [
        Transformer2DModelOutput(sample=whole.sample[span]) for span in (slice(2), slice(2, 5))
    ]
    how = find_join(whole, parts[0], batch=B, own=2)
    assert how == Join("each", items=(("sample", Join("cat")),))
    result = join(parts, how)
    assert type(result) is Transformer2DModelOutput
    for view in (result.sample, result["sample"], result[0], *result.to_tuple()):
        assert torch.equal(view, whole.sample)


def test_an_object_of_no_known_kind_must_be_equal() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

    assert find_join(Odd(), Odd(), batch=B, own=2) is None
