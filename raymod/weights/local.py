"""The driver's own weights: let go of, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from raymod.errors import UnsupportedError, WeightsError

__all__ = ["Freed", "free", "named_weights", "vacant"]

_Dict = dict[str, "torch.Tensor | None"]


@dataclass
class _Slot:
    """One weight and every place that holds it."""

    tensor: torch.Tensor
    shape: torch.Size
    device: torch.device
    names: list[str]
    places: list[tuple[_Dict, str]]


def free(module: nn.Module) -> Freed:
    """Let go of the data of all parameters and persistent buffers.

    Meta tensors of the same shapes and dtypes take their places, so that what asks for shapes
    still gets an answer. Non-persistent buffers stay: they are small, belong to no checkpoint,
    and helpers that a pipeline calls on the driver read them.

    Raises:
        UnsupportedError: A weight is of a tensor subclass (quantised, say).
    """
    slots = _slots(module)
    for slot in slots:
        if type(slot.tensor) not in (torch.Tensor, nn.Parameter):
            raise UnsupportedError(
                f"keep_local=False: {slot.names[0]} is a {type(slot.tensor).__name__}, whose data "
                f"cannot be freed and put back. Keep the local weights."
            )
    return Freed(_emptied(slots))


def vacant(skeleton: nn.Module) -> Freed:
    """The places of the weights of a module that has none here, to be filled by `Freed.restore`.

    Args:
        skeleton: A module whose weights are on the meta device.
    """
    return Freed([_vacated(slot) for slot in _slots(skeleton)])


class Freed:
    """Weights that were let go of, or never were here; made by `free` and `vacant`."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots

    def restore(self, values: Mapping[str, torch.Tensor]) -> None:
        """Put the very parameters and buffers from before back, with `values` as their data.

        Args:
            values: By name; a tied weight under any of its names. Names that were not freed are
                ignored. The tensors are taken over where their device is right.

        Raises:
            WeightsError: One is missing or has another shape; then nothing is changed.
        """
        found = [_value(slot, values) for slot in self._slots]
        for slot, value in zip(self._slots, found, strict=True):
            slot.tensor.data = value.detach().to(slot.device)
            for holder, name in slot.places:
                holder[name] = slot.tensor

    def follow(self, module: nn.Module) -> None:
        """Free what the module has got since, and note the names that its weights have now.

        Weights that it has lost are forgotten.

        Args:
            module: The module whose weights were freed.
        """
        known = {(id(holder), key): slot for slot in self._slots for holder, key in slot.places}
        kept: dict[int, _Slot] = {}
        new: list[tuple[str, torch.Tensor, _Dict, str]] = []
        for name, tensor, holder, key in named_weights(module):
            slot = known.get((id(holder), key))
            if slot is None or not tensor.is_meta:
                new.append((name, tensor, holder, key))
                continue
            if id(slot) not in kept:
                slot.names, slot.places, kept[id(slot)] = [], [], slot
            slot.names.append(name)
            slot.places.append((holder, key))
        self._slots = [*kept.values(), *_emptied(_gathered(new))]


def _slots(module: nn.Module) -> list[_Slot]:
    return _gathered(named_weights(module))


def _emptied(slots: list[_Slot]) -> list[_Slot]:
    """Put meta tensors where the weights are, and let go of these."""
    for slot in slots:
        tensor = slot.tensor
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        for holder, name in slot.places:
            holder[name] = empty
        if tensor.is_meta:
            _vacated(slot)
            continue
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.grad = None
    return slots


def _vacated(slot: _Slot) -> _Slot:
    """With an empty tensor, to be filled later, instead of a meta one, which cannot be."""
    tensor = slot.tensor
    empty = torch.empty(0, dtype=tensor.dtype)
    is_parameter = isinstance(tensor, nn.Parameter)
    slot.tensor = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    slot.device = torch.device("cpu")
    return slot


def _gathered(weights: Iterable[tuple[str, torch.Tensor, _Dict, str]]) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for name, tensor, holder, key in weights:
        slot = slots.setdefault(id(tensor), _Slot(tensor, tensor.shape, tensor.device, [], []))
        slot.names.append(name)
        slot.places.append((holder, key))
    return list(slots.values())


def named_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, _Dict, str]]:
    """All parameters and persistent buffers: name, tensor, and the dict and key that hold it.

    A weight that is held in several places comes up with each of its names.
    """
    for prefix, part in module.named_modules(remove_duplicate=False):
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                if tensor is None or key in part._non_persistent_buffers_set:
                    continue
                yield f"{prefix}.{key}".lstrip("."), tensor, holder, key


def _value(slot: _Slot, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    value = next((values[name] for name in slot.names if name in values), None)
    if value is None:
        raise WeightsError(f"the weights cannot be put back: {slot.names[0]} did not come back")
    if value.shape != slot.shape:
        raise WeightsError(
            f"the weights cannot be put back: {slot.names[0]} came back as {tuple(value.shape)}, "
            f"not {tuple(slot.shape)}"
        )
    return value
