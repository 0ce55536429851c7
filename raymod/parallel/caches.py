"""The step caches of a module on ranks: what they decide from, and what they must not notice.

diffusers' caches are hooks that skip work when little has changed since the last step. On a rank
they see its tokens and samples only. What is decided from these is decided by all ranks together;
otherwise one would wait for another in a collective that the other skips.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raymod.parallel.mesh import Mesh
from raymod.parallel.ways import Mechanism

__all__ = ["Caches"]

# Ranks reach a decision at the same time, unless one of them compiles and another does not.
MAX_WAIT_S = 1800.0

_MODULES = (
    "diffusers.hooks.faster_cache",
    "diffusers.hooks.first_block_cache",
    "diffusers.hooks.mag_cache",
    "diffusers.hooks.pyramid_attention_broadcast",
    "diffusers.hooks.sea_cache",
    "diffusers.hooks.taylorseer_cache",
    "diffusers.hooks.text_kv_cache",
)


class Caches:
    """The step caches of one rank's module.

    Attributes:
        hooks: Their hooks, of all parts of the module.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, mechanisms: Sequence[Mechanism]) -> None:
        """Find them, and let what they decide be decided with the other ranks.

        Args:
            module: The module.
            mesh: The ranks.
            mechanisms: What splits the module, and is told what the caches do not skip.
        """
        self._module = module
        self._mesh = mesh
        self._mechanisms = mechanisms
        self.hooks: list[Any] = []
        self.find()

    def find(self) -> None:
        """Look again, after the module has changed."""
        self.hooks = [
            hook
            for part in self._module.modules()
            for hook in getattr(getattr(part, "_diffusers_hook", None), "hooks", {}).values()
            if type(hook).__module__ in _MODULES
        ]
        self._last: dict[Any, Any] = {}
        for number, hook in enumerate(self.hooks):
            join = _JOINED.get(type(hook).__name__)
            if join is not None:
                join(hook, self._mesh)
            if self._mechanisms:
                hook.fn_ref = _Noting(_real(hook), self._mechanisms, number)

    def batch_limit(self, batch: int, groups: int) -> str:
        """Why a batch cannot be divided into `groups` while the caches are on; empty if it can."""
        for hook in self.hooks:
            name = type(hook).__name__
            if name == "FasterCacheDenoiserHook" and not hook.is_guidance_distilled:
                return (
                    "FasterCache takes a batch for two halves, one with and one without the "
                    "prompt, so it is not divided by batch"
                )
            if name == "SeaCacheRootHook":
                return "SeaCache compares all samples of a batch, so it is not divided by batch"
            if name in ("FBCHeadBlockHook", "MagCacheHeadHook") and batch < groups:
                return f"a batch of {batch} is too small for {groups} groups that decide together"
        return ""

    @contextmanager
    def off(self) -> Iterator[None]:
        """The module as if it had no caches; they notice nothing of what runs inside."""
        references = [_real(hook) for hook in self.hooks]
        saved = [(ref.pre_forward, ref.forward, ref.post_forward) for ref in references]
        for ref in references:
            ref.pre_forward, ref.post_forward = _same_arguments, _same_output
            ref.forward = ref.original_forward or ref.forward
        try:
            yield
        finally:
            for ref, (before, forward, after) in zip(references, saved, strict=True):
                ref.pre_forward, ref.forward, ref.post_forward = before, forward, after

    @property
    def phase(self) -> Hashable:
        """What makes a call larger or smaller than others of its shape; equal on all ranks."""
        return tuple(
            _halves_batch(hook)
            for hook in self.hooks
            if type(hook).__name__ == "FasterCacheDenoiserHook"
        )

    def expect(self, way: Any, shape: Any) -> None:
        """Before a call: forget what was kept of calls of another shape, or split another way.

        Args:
            way: How the call is run.
            shape: The shape of its main input.
        """
        if not self.hooks:
            return
        name = self._context_name()
        now = (way, shape)
        if self._last.get(name, now) != now:
            self.reset()
        self._last[name] = now

    def reset(self) -> None:
        """Forget what the caches hold; the context that was entered stays."""
        context = self._context()
        for hook in self.hooks:
            if hook._is_stateful:
                hook.reset_state(self._module)
        for manager in self._managers():
            manager.set_context(context)
        self._last.clear()

    def _managers(self) -> Iterator[Any]:
        for hook in self.hooks:
            for name in ("state_manager", "block_state_manager"):
                manager = getattr(hook, name, None)
                if manager is not None:
                    yield manager

    def _context(self) -> Any:
        return next((m._context for m in self._managers() if m._context is not None), None)

    def _context_name(self) -> str | None:
        return getattr(self._context(), "name", None)


class _Noting:
    """Passes for a hook's reference to what it wraps, and tells the splits when that runs."""

    def __init__(self, real: Any, mechanisms: Sequence[Mechanism], number: int) -> None:
        self.real = real
        self._mechanisms = mechanisms
        self._number = number

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        for mechanism in self._mechanisms:
            mechanism.note(self._number)
        return self.real.original_forward(*args, **kwargs)


def _real(hook: Any) -> Any:
    return hook.fn_ref.real if isinstance(hook.fn_ref, _Noting) else hook.fn_ref


def _halves_batch(hook: Any) -> bool:
    """Whether FasterCache will run half of the batch only."""
    if hook.is_guidance_distilled or hook.state.iteration == 0:
        return False
    low, high = hook.unconditional_batch_timestep_skip_range
    within = low < hook.current_timestep_callback() < high
    return bool(within and hook.state.iteration % hook.unconditional_batch_skip_range != 0)


def _same_arguments(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def _same_output(module: nn.Module, output: Any) -> Any:
    return output


def _mean(total: float, count: float, like: torch.Tensor) -> torch.Tensor:
    """A mean over all ranks, rounded as the mean of one tensor is."""
    return torch.tensor(total / count, dtype=torch.float64).to(like.dtype)


def _join_first_block(hook: Any, mesh: Mesh) -> None:
    """First-block cache: the mean change of the first block's residual, of all tokens."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def should_compute(residual: torch.Tensor) -> bool:
        before = hook.state_manager.get_state().head_block_residual
        if before is None:
            return True
        parts = [(residual - before).abs(), before.abs()]
        sums = [float(part.sum(dtype=torch.float64)) for part in parts]
        change, size, count = mesh.total([*sums, float(before.numel())], limit_s=MAX_WAIT_S)
        ratio = _mean(change, count, residual) / _mean(size, count, residual)
        return bool(ratio.item() > hook.threshold)

    if mesh.world_size > 1:
        hook._should_compute_remaining_blocks = should_compute


def _join_magnitudes(hook: Any, mesh: Mesh) -> None:
    """MagCache decides from its table alone; only calibrating it measures tokens."""

    def calibrate(state: Any, residual: torch.Tensor) -> None:
        ratio = 1.0
        if state.previous_residual is not None:
            now = torch.linalg.norm(residual.float(), dim=-1)
            before = torch.linalg.norm(state.previous_residual.float(), dim=-1)
            ratios = now / (before + 1e-8)
            total = float(ratios.sum(dtype=torch.float64))
            total, count = mesh.total([total, float(ratios.numel())], limit_s=MAX_WAIT_S)
            ratio = total / count
        state.calibration_ratios.append(ratio)

    if mesh.world_size > 1:
        hook._perform_calibration_step = calibrate


def _join_text(hook: Any, mesh: Mesh) -> None:
    """The cache of text projections tells prompts apart by address, which travel does not keep.

    Equal texts are made one tensor, which is kept so that no other can have its address.
    """
    if hasattr(hook, "raymod_texts"):
        return
    texts: list[torch.Tensor] = []
    hook.raymod_texts = texts
    reference = _real(hook)
    original, reset = reference.forward, hook.reset_state

    def forward(*args: Any, **kwargs: Any) -> Any:
        text = kwargs.get("encoder_hidden_states")
        if text is not None:
            kwargs["encoder_hidden_states"] = _known(text, texts)
        return original(*args, **kwargs)

    def reset_state(module: nn.Module) -> Any:
        texts.clear()
        return reset(module)

    reference.forward, hook.reset_state = forward, reset_state


def _known(text: torch.Tensor, texts: list[torch.Tensor]) -> torch.Tensor:
    for one in texts:
        if one.shape == text.shape and one.dtype == text.dtype and torch.equal(one, text):
            return one
    texts.append(text)
    return text


_JOINED: dict[str, Callable[[Any, Mesh], None]] = {
    "FBCHeadBlockHook": _join_first_block,
    "MagCacheBlockHook": _join_magnitudes,
    "TextKVCacheTransformerHook": _join_text,
}
