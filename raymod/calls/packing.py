"""Objects apart and together again: a picklable skeleton and a flat list of tensors.

Tensors are never pickled: they leave the object graph through the pickler's `persistent_id`, so
that a transport can move their bytes as they are. Everything else goes through cloudpickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

from raymod.calls.faults import find_fault, is_call, type_name
from raymod.calls.tensors import TensorMeta, bytes_of, tensor_from
from raymod.errors import PackError

__all__ = [
    "Packed",
    "TensorMeta",
    "bytes_of",
    "describe",
    "pack",
    "put_together",
    "take_apart",
    "tensor_from",
    "unpack",
]

Reducer = Callable[[Any], Any]


@dataclass(frozen=True)
class Packed:
    """An object as a skeleton and the tensors that belong in it.

    Attributes:
        skeleton: The pickled structure, with a marker for each tensor.
        tensors: Dense and detached. They share memory with the tensors of the packed object where
            those were like that already.
    """

    skeleton: bytes
    tensors: tuple[torch.Tensor, ...]

    def plain(self) -> Packed:
        """The same with tensors that are contiguous and on the CPU; those that were are shared."""
        return Packed(self.skeleton, tuple(map(_plain, self.tensors)))

    @property
    def nbytes(self) -> int:
        """Size of skeleton and tensors in bytes."""
        return len(self.skeleton) + sum(tensor.nbytes for tensor in self.tensors)


def pack(
    obj: Any, *, what: str = "argument", as_it_is: bool = False, dense: bool = False
) -> Packed:
    """Take `obj` apart into what can be sent.

    A tensor that occurs twice stays one. Views are packed as what they show: a slice of a large
    tensor is small. Of a tensor that is no parameter, `requires_grad` and attributes set on it do
    not travel.

    Args:
        obj: Any nesting of containers, dataclasses, modules, tensors and picklable objects.
        what: What to call it in an error: "argument", "output".
        as_it_is: Leave the tensors' strides and devices, for a transport to copy from; else they
            come out as `Packed.plain` makes them.
        dense: Refuse tensors that are sparse, nested, quantized or without data.

    Raises:
        PackError: Part of it does not pickle; the message says which.
    """
    skeleton, tensors = take_apart(obj, what=what, reduce=_refuse_others if dense else None)
    packed = Packed(skeleton, tuple(tensor.detach() for tensor in tensors))
    return packed if as_it_is else packed.plain()


def unpack(packed: Packed, *, device: torch.device | None = None) -> Any:
    """The object again, made of the tensors in `packed` themselves.

    Args:
        packed: What `pack` returned, here or in another process.
        device: Where its tensors are to be. None: where they are, without a copy.

    Raises:
        PackError: It needs a module or a name that this process cannot import.
    """
    tensors = packed.tensors
    if device is not None:
        tensors = tuple(tensor.to(device) for tensor in tensors)
    try:
        return put_together(packed.skeleton, tensors)
    except (ImportError, AttributeError) as error:
        raise PackError(
            f"what arrived cannot be put together in this process: {error}. Driver and ranks must "
            f"be able to import the same modules."
        ) from error


def take_apart(
    obj: Any, *, what: str = "argument", reduce: Reducer | None = None, meta: bool = False
) -> tuple[bytes, list[torch.Tensor]]:
    """Skeleton and tensors of `obj`, the tensors as they are: any strides, any device.

    Args:
        obj: As for `pack`.
        what: As for `pack`.
        reduce: Asked first how an object is pickled; returns what `__reduce_ex__` would, or
            NotImplemented.
        meta: Whether tensors on the meta device are taken out too, for others to take their places.

    Raises:
        PackError: Part of it does not pickle; the message says which.
    """
    try:
        return _take_apart(obj, reduce, meta)
    except Exception as error:
        path, part = find_fault(
            obj,
            "" if is_call(obj) else what,
            lambda part: not _travels(part, reduce),
            lambda module: _state_of(module, reduce),
        )
        subject = f"{what} {path}" if is_call(obj) else path
        raise PackError(
            f"{subject} is a {type_name(part)}, which cannot travel between driver and ranks: "
            f"{_reason(part, reduce, error)}"
        ) from error


def put_together(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The object of a skeleton; its errors are those of pickle."""
    return _Unpacker(skeleton, tensors).load()


def describe(obj: Any, limit: int = 500) -> str:
    """A short text that says what is in `obj`, for error messages.

    Args:
        obj: Arguments, an output; `(args, kwargs)` reads like a call.
        limit: Longest text to return, in characters.

    Returns:
        Like `hidden_states: float32[1, 64, 16], return_dict=False`.
    """
    if is_call(obj):
        args, kwargs = obj[:2]
        parts = [_show(value) for value in args]
        parts += [_named(name, value) for name, value in kwargs.items()]
        text = ", ".join(parts)
    else:
        text = _show(obj)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes the tensors out. A marker is the index; of a parameter, `(index, requires_grad)`."""

    def __init__(self, file: io.BytesIO, reduce: Reducer | None, meta: bool) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._markers: dict[int, int | tuple[int, bool]] = {}
        self._reduce = reduce
        self._meta = meta

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if (kind is torch.Tensor or kind is nn.Parameter) and _is_dense(obj, self._meta):
            return self._markers.get(id(obj)) or self._take(obj, kind)
        return None

    def _take(self, tensor: torch.Tensor, kind: type) -> int | tuple[int, bool]:
        self.tensors.append(tensor)  # also keeps its id taken
        index = len(self.tensors)
        marker = index if kind is torch.Tensor else (index, tensor.requires_grad)
        self._markers[id(tensor)] = marker
        return marker

    def reducer_override(self, obj: Any) -> Any:
        if self._reduce is not None:
            reduced = self._reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        if isinstance(obj, torch.Tensor):
            return _reduce_tensor(obj)
        reason = _refusal(obj)
        if reason is not None:
            raise PackError(reason)
        return super().reducer_override(obj)


class _Unpacker(pickle.Unpickler):
    def __init__(self, skeleton: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._tensors = tensors
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, marker: Any) -> torch.Tensor:
        if type(marker) is int:
            return self._tensors[marker - 1]
        index, requires_grad = marker
        if index not in self._parameters:
            self._parameters[index] = nn.Parameter(self._tensors[index - 1], requires_grad)
        return self._parameters[index]


def _take_apart(
    obj: Any, reduce: Reducer | None, meta: bool = False
) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    packer = _Packer(file, reduce, meta)
    packer.dump(obj)
    return file.getvalue(), packer.tensors


def _travels(obj: Any, reduce: Reducer | None) -> bool:
    try:
        _take_apart(obj, reduce)
    except Exception:
        return False
    return True


def _state_of(module: nn.Module, reduce: Reducer | None) -> Any:
    reduced = NotImplemented if reduce is None else reduce(module)
    return vars(module) if reduced is NotImplemented else reduced[2]


def _reason(part: Any, reduce: Reducer | None, error: Exception) -> str:
    """Why `part` fails by itself."""
    try:
        _take_apart(part, reduce)
    except Exception as own:
        error = own
    return f"{error}"


def _is_dense(tensor: torch.Tensor, meta: bool) -> bool:
    return (
        tensor.layout is torch.strided
        and (meta or not tensor.is_meta)
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg().cpu().contiguous()


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """A tensor that is not plain: waited for, or pickled torch's way, its inner tensors apart."""
    # Known by name: this module does not import torch.distributed.
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return _same, (tensor.wait(),)  # type: ignore[attr-defined]
    if type(tensor).__name__ == "GGUFParameter":  # diffusers': its own way never ends
        plain = torch.Tensor._make_subclass(torch.Tensor, tensor, False)
        return _gguf, (type(tensor), plain, tensor.quant_type)  # type: ignore[attr-defined]
    return NotImplemented


def _refuse_others(obj: Any) -> Any:
    """A reducer that lets no tensor pass but dense ones, and subclasses that hold such."""
    if isinstance(obj, torch.Tensor) and not _is_dense(obj, meta=False):
        if obj.is_meta:
            raise PackError("it has no data (it is on the meta device).")
        if obj.is_quantized:
            raise PackError("it is quantized. Pass tensor.dequantize().")
        kind = "nested" if obj.is_nested else f"not dense ({obj.layout})"
        raise PackError(f"it is {kind}, and only dense tensors can be split. Pass a dense one.")
    return NotImplemented


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _gguf(cls: Any, plain: torch.Tensor, quant_type: Any) -> Any:
    return cls(plain, quant_type=quant_type)


def _refusal(obj: Any) -> str | None:
    """Why `obj` must not travel although it would pickle."""
    if isinstance(obj, torch.Generator):
        return (
            "its copy would draw the same numbers again on every rank. Draw them here and pass "
            "the tensor."
        )
    if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
        return "an open file belongs to one process. Pass its path or its content."
    return None


def _named(name: str, value: Any) -> str:
    if isinstance(value, (torch.Tensor, list, tuple, Mapping)) and value is not None:
        return f"{name}: {_show(value)}"
    return f"{name}={_show(value)}"


def _show(obj: Any) -> str:
    if isinstance(obj, torch.Tensor):
        device = "" if obj.device.type == "cpu" else f" on {obj.device}"
        return f"{str(obj.dtype).removeprefix('torch.')}{list(obj.shape)}{device}"
    if isinstance(obj, Mapping):
        inner = ", ".join(_named(str(key), value) for key, value in obj.items())
        name = "" if type(obj) is dict else type(obj).__name__
        return f"{name}{{{inner}}}"
    if isinstance(obj, (list, tuple)):
        return _show_sequence(obj)
    if obj is None or isinstance(obj, (bool, int, float, complex)):
        return repr(obj)
    if isinstance(obj, str):
        return repr(obj if len(obj) <= 40 else obj[:37] + "...")
    return type_name(obj)


def _show_sequence(obj: Sequence[Any]) -> str:
    open_, close = ("[", "]") if isinstance(obj, list) else ("(", ")")
    shown = [_show(value) for value in obj[:4]]
    if len(obj) > 4:
        shown.append(f"... {len(obj)} in all")
    return open_ + ", ".join(shown) + close
