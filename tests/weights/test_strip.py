"""Hooks: what stays with the driver, what is refused, and that the user's module keeps its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raymod import weights
from raymod.errors import UnsupportedError, WeightsError
from tests import models
from tests.weights.test_offer import through_file

accelerate_hooks = pytest.importorskip("accelerate.hooks")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def hook_attributes(module: nn.Module) -> list[str]:
    names = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward", "to", "hf_device_map")
    return [name for part in module.modules() for name in names if name in vars(part)]


def test_placing_hooks_are_left_out_of_the_copy() -> None:
    module, x = small(), torch.randn(2, 3)
    wanted = module(x)
    for part in (module, module[1][1]):
        accelerate_hooks.add_hook_to_module(
            part, accelerate_hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
        )
    accelerate_hooks.add_hook_to_module(module, accelerate_hooks.CpuOffload("cpu"), append=True)
    assert len(hook_attributes(module)) == 6
    copy = through_file(module)
    assert hook_attributes(copy) == []
    assert torch.equal(copy(x), wanted)
    assert len(hook_attributes(module)) == 6
    assert torch.equal(module(x), wanted)


def test_a_dispatched_module_is_sent_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import dispatch_model

    module, x = small(), torch.randn(2, 3)
    wanted = module(x)
    dispatch_model(module, {"0": "cpu", "1": "cpu"}, main_device="cpu", force_hooks=True)
    assert "to" in hook_attributes(module)
    copy = through_file(module)
    assert hook_attributes(copy) == []
    assert torch.equal(copy(x), wanted)


def test_a_forward_of_the_users_own_goes_along() -> None:
    module, x = small(), torch.randn(2, 3)
    module[1].forward = lambda x: x * 2
    accelerate_hooks.add_hook_to_module(module[1], accelerate_hooks.CpuOffload("cpu"))
    copy = through_file(module)
    assert torch.equal(copy(x), module[0](x) * 2)


def test_offloaded_modules_are_refused() -> None:
    from accelerate import cpu_offload

    module = small()
    cpu_offload(module, execution_device=torch.device("cpu"))
    with pytest.raises(WeightsError, match=r"no data .*remove_all_hooks\(\)"):
        weights.offer("auto", module)


def test_unknown_hooks_of_accelerate_are_refused() -> None:
    class Strange(accelerate_hooks.ModelHook):  # type: ignore[misc]
        pass

    module = small()
    accelerate_hooks.add_hook_to_module(module[1], Strange())
    with pytest.raises(WeightsError, match=r"Sequential\.1 has a hook .*\(Strange\)"):
        weights.offer("auto", module)


def test_forward_hooks_of_the_root_stay_with_the_driver() -> None:
    module = small()
    calls: list[str] = []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    copy = through_file(module)
    assert not copy._forward_hooks
    assert not copy._forward_pre_hooks
    copy(torch.randn(1, 3))
    assert calls == []
    module(torch.randn(1, 3))
    assert calls == ["before", "after"]


def test_forward_hooks_of_the_root_need_not_pickle() -> None:
    import threading

    module, lock = small(), threading.Lock()
    module.register_forward_hook(lambda *_: lock and None)
    assert through_file(module)(torch.zeros(1, 3)).shape == (1, 2)
    module[1].lock = threading.Lock()  # the fault is here, not in the hook
    with pytest.raises(WeightsError, match=r"Sequential\.1\.lock is"):
        weights.offer("auto", module)


def test_forward_hooks_within_go_along_and_it_says_so() -> None:
    module = small()
    module[1].register_forward_hook(lambda _, args, out: out * 10)
    with weights.offer("auto", module) as offered:
        assert any("hooks of 1 submodules (1" in text for text in offered.warnings)
        copy = weights.load(offered.ticket)
    x = torch.randn(2, 3)
    assert torch.equal(copy(x), module(x))
    assert weights.offer("auto", small()).warnings == ()


def test_compiled_modules() -> None:
    module = small()
    with pytest.raises(UnsupportedError, match=r"torch\.compile.*_orig_mod"):
        weights.offer("auto", torch.compile(module))
    module.compile()
    with weights.offer("auto", module) as offered:
        assert any("uncompiled" in text for text in offered.warnings)


def group_offload(module: Any) -> None:
    module.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="leaf_level", use_stream=False
    )


def casting(module: Any) -> None:
    module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def cache(module: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    module.enable_cache(FirstBlockCacheConfig(threshold=0.1))


@pytest.mark.parametrize(
    ("enable", "advice"),
    [
        (group_offload, "without enable_group_offload"),
        (casting, "without enable_layerwise_casting"),
        (cache, r"disable_cache\(\)"),
    ],
)
def test_hooks_of_diffusers_are_refused_by_name(enable: Any, advice: str) -> None:
    module, _ = models.flux()
    enable(module)
    with pytest.raises(WeightsError, match=rf"has the diffusers hook '\w+': .*{advice}"):
        weights.offer("auto", module)


def test_what_diffusers_leaves_behind_does_not_matter() -> None:
    module, make_inputs = models.flux()
    cache(module)
    module.disable_cache()
    assert "_diffusers_hook" in hook_attributes(module)
    copy = through_file(module)
    assert hook_attributes(copy) == []
    with torch.no_grad():
        assert torch.equal(copy(**make_inputs())[0], module(**make_inputs())[0])
