"""A call is made on the ranks in the modes of torch that the driver is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch

from raymod.calls.modes import in_modes, modes


@contextmanager
def _set(setter: Any, getter: Any, value: Any) -> Any:
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


CASES: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast-half": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "default_dtype": lambda: _set(torch.set_default_dtype, torch.get_default_dtype, torch.bfloat16),
    "float32_matmul_precision": lambda: _set(
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"
    ),
    "deterministic": lambda: _set(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mode_is_the_same_on_the_other_side(name: str) -> None:
    mode: AbstractContextManager[Any] = CASES[name]()
    assert modes() == {}
    with mode:
        found = modes()
    assert list(found) == [name.partition("-")[0]]
    assert modes() == {}
    with in_modes(found):
        assert modes() == found
    assert modes() == {}


def test_all_at_once_and_after_an_error() -> None:
    with ExitStack() as stack:
        for case in CASES.values():
            stack.enter_context(case())
        found = modes()
    assert len(found) == 4
    with pytest.raises(ValueError, match="in the module"):
        _fail_in(found)
    assert modes() == {}


def test_an_inner_block_switches_autocast_off() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert modes() == {}


def _fail_in(found: Any) -> None:
    with in_modes(found):
        assert modes() == found
        raise ValueError("in the module")
