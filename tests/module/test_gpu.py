"""With a GPU: the rest of a pipeline offloads, and the stub notes the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raymod
from tests.module.families import controlnet, run

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OFFLOADS: dict[str, Any] = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "group": lambda pipe: pipe.enable_group_offload(
        onload_device=torch.device("cuda"), offload_type="leaf_level"
    ),
    "none": lambda pipe: pipe.to("cuda"),
}
# The ranks need no GPU of their own here: it is the driver's that is looked at.
CPU_RANKS = raymod.GangConfig(gpus_per_rank=0)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", OFFLOADS)
def test_the_rest_of_a_pipeline_offloads(ray_session: Any, kind: str, before: bool) -> None:
    (plain, arguments), (pipe, _) = controlnet(), controlnet()
    expected = run(plain.to("cuda"), arguments)
    unet = pipe.unet
    if before:
        OFFLOADS[kind](pipe)
    stub = raymod.wrap(pipe, workers=1, gang=CPU_RANKS)
    if not before:
        OFFLOADS[kind](pipe)
    output = run(pipe, arguments)
    assert output.device.type == "cuda"
    assert torch.allclose(output.cpu(), expected.cpu(), rtol=1e-3, atol=1e-2)
    if kind != "none":
        assert not any(parameter.is_cuda for parameter in pipe.controlnet.parameters())
    if not before:
        assert not any(parameter.is_cuda for parameter in stub.parameters())
    assert raymod.unwrap(pipe) is unet
    assert torch.allclose(run(pipe, arguments).cpu(), expected.cpu(), rtol=1e-3, atol=1e-2)


def test_the_device_is_what_was_asked_for(ray_session: Any) -> None:
    pipe, _ = controlnet()
    stub = raymod.wrap(pipe, workers=1, gang=CPU_RANKS)
    pipe.to("cuda")
    assert stub.device == torch.device("cuda")
    assert not any(parameter.is_cuda for parameter in stub.parameters())
    raymod.unwrap(pipe)
