"""What ranks import, and what they put off: each script here runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FLUX = """
import sys, torch
from raymod.worker.imports import PUT_OFF, import_all
import_all(["diffusers.models.transformers.transformer_flux"])
loaded = lambda: [name for name in (*PUT_OFF, "sympy") if name in sys.modules]
assert loaded() == [], loaded()
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
torch.manual_seed(0)
model = FluxTransformer2DModel(
    patch_size=1, in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8,
    num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
    axes_dims_rope=(4, 2, 2), guidance_embeds=True,
)
call = dict(
    hidden_states=torch.randn(1, 6, 8), encoder_hidden_states=torch.randn(1, 4, 16),
    pooled_projections=torch.randn(1, 16), timestep=torch.tensor([0.5]), guidance=torch.ones(1),
    img_ids=torch.randn(6, 3), txt_ids=torch.randn(4, 3), return_dict=False,
)
def run(**kwargs):
    with torch.no_grad(), model.cache_context("cond"):
        return model(**call, **kwargs)[0]
plain = run()
assert loaded() == [], loaded()
"""


def _run(script: str, folder: Path | None = None) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if folder is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_runs_without_what_was_put_off_and_gets_it_when_needed() -> None:
    _run(
        FLUX
        + """
from peft import LoraConfig
model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
assert "transformers" in sys.modules
with_lora = run()
assert (with_lora - plain).abs().max() > 1e-4
assert torch.equal(run(joint_attention_kwargs={"scale": 0.0}), plain)
model.disable_adapters()
assert torch.equal(run(), plain)

from diffusers.hooks.layerwise_casting import BaseTunerLayer
from peft.tuners.tuners_utils import BaseTunerLayer as Real
layers = [m for m in model.modules() if isinstance(m, Real)]
assert layers and all(isinstance(m, BaseTunerLayer) for m in layers)
assert not isinstance(model, BaseTunerLayer) and issubclass(type(layers[0]), BaseTunerLayer)

import scipy.stats, torch._dynamo
assert scipy.stats.norm.cdf(0.0) == 0.5 and torch._dynamo.disable.__module__ != "raymod"
"""
    )


def test_what_was_imported_without_dynamo_compiles() -> None:
    _run(
        FLUX
        + """
compiled = torch.compile(model, backend="eager", fullgraph=True)
with torch.no_grad():
    assert torch.allclose(compiled(**call)[0], plain, atol=1e-6)
from diffusers.utils.torch_utils import is_compiled_module
assert is_compiled_module(compiled) and not is_compiled_module(model)

from diffusers import FirstBlockCacheConfig
model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
model.compile_repeated_blocks(backend="eager")
assert torch.allclose(run(), plain, atol=1e-6)
model.disable_cache()
assert torch.allclose(run(), plain, atol=1e-6)
"""
    )


def test_a_module_that_needs_the_real_thing_gets_it(tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text(
        "import scipy.stats\n"
        "from transformers import PreTrainedModel\n"
        "class Mine(PreTrainedModel):\n"
        "    pass\n"
        "MEDIAN = scipy.stats.norm.ppf(0.5)\n"
    )
    _run(
        """
import sys
from raymod.worker.imports import import_all
import_all(["needy", "no_such_module"])
from transformers import PreTrainedModel
assert issubclass(sys.modules["needy"].Mine, PreTrainedModel)
assert sys.modules["needy"].MEDIAN == 0.0
""",
        tmp_path,
    )
