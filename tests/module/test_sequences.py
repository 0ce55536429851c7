"""After each of many random changes, a wrapped model does what a plain one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raymod.weights import free
from tests import models
from tests.module.sequences import Sequence, flux
from tests.module.standin import Ranks, stub_of

STEPS = 30


def call(module: Any, scale: float | None = None) -> torch.Tensor:
    inputs = models.flux()[1](1)
    if scale is not None:
        inputs["joint_attention_kwargs"] = {"scale": scale}
    with torch.no_grad():
        return module(**inputs)[0]


@pytest.mark.parametrize("kind", ["shared", "freed", "rebuilt"])
@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_of_changes(seed: int, kind: str) -> None:  # R112, R113
    """`freed`: without local weights; `rebuilt`: the ranks are started anew in between."""
    plain, module = flux(), flux()
    ranks = Ranks(module, 2)
    options = {"freed": free(module)} if kind == "freed" else {}
    stub, _ = stub_of(module, ranks=ranks, from_local=kind == "shared", **options)
    done = []
    steps = Sequence(seed, flux).steps(STEPS)
    for number, (name, change) in enumerate(steps):
        done.append(name)
        change(plain)
        change(stub)
        if kind == "rebuilt" and number % 10 == 9:
            call(stub)  # what was done to parts has been told to the ranks
            ranks.start_anew(flux())
        for scale in (None, 0.4):
            assert torch.equal(call(plain, scale), call(stub, scale)), done
        first, second = (worker.module.state_dict() for worker in ranks.workers)
        assert first.keys() == second.keys()
    assert len(set(done)) > 8
