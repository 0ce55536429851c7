"""A module that is offloaded in parts is wrapped as it was before, and is offloaded again after."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raymod
from raymod.api.offloading import detach
from tests.module.families import run, stable_diffusion
from tests.module.test_sharing import OFFLOADS


def hooked(module: Any) -> dict[str, list[str]]:
    """What hooks are on which part."""
    return {
        name: [
            type(getattr(part, "_hf_hook", None)).__name__,
            *getattr(getattr(part, "_diffusers_hook", None), "hooks", {}),
        ]
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize("kind", ["sequential", "group"])
def test_it_comes_off_and_goes_on_again(kind: str) -> None:
    pipe, _ = stable_diffusion()
    weights = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    nothing = hooked(pipe.unet)
    detach(pipe.unet)()  # where there is nothing to do, nothing is done
    assert hooked(pipe.unet) == nothing
    OFFLOADS[kind](pipe)
    offloaded = hooked(pipe.unet)
    assert offloaded != nothing
    put_back = detach(pipe.unet)
    assert hooked(pipe.unet) == nothing
    assert pipe.unet.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in pipe.unet.state_dict().items())
    put_back()
    assert hooked(pipe.unet) == offloaded


@pytest.mark.gang
def test_a_pipeline_that_is_offloaded_may_be_wrapped(ray_session: Any) -> None:
    plain, arguments = stable_diffusion()
    pipe, _ = stable_diffusion()
    OFFLOADS["group"](pipe)
    unet, offloaded = pipe.unet, hooked(pipe.unet)
    raymod.wrap(pipe, batch_degree=2)
    assert torch.allclose(run(pipe, arguments), run(plain, arguments), rtol=1e-4, atol=1e-3)
    assert raymod.unwrap(pipe) is unet
    assert hooked(unet) == offloaded
    assert torch.equal(run(pipe, arguments), run(plain, arguments))

    def broken() -> Any:
        raise RuntimeError("no such checkpoint")

    with pytest.raises(raymod.GangStartError, match="no such checkpoint"):
        raymod.wrap(pipe, workers=1, weights=broken)
    assert hooked(unet) == offloaded
