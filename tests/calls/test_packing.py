"""pack and unpack: whatever goes in comes out, and what cannot says where it is."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from raymod.calls import TensorMeta, bytes_of, describe, pack, tensor_from, unpack
from raymod.errors import PackError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    value: Any


class Marked(torch.Tensor):
    """A tensor subclass, as quantised tensors are."""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "not dense (torch.sparse_coo)"),
        (lambda: torch.eye(3).to_sparse_csr(), "not dense (torch.sparse_csr)"),
        (lambda: torch.eye(3).to_mkldnn(), "not dense (torch._mkldnn)"),
        (lambda: torch.empty(3, device="meta"), "no data"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
    ],
    ids=["coo", "csr", "mkldnn", "meta", "quantized", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_refused_where_they_are_not_wanted(
    make: Callable[[], torch.Tensor], says: str
) -> None:
    with pytest.raises(PackError) as caught:
        pack(((), {"states": [torch.ones(2), make()]}), dense=True)
    assert str(caught.value).startswith("argument kwargs['states'][1] is a torch")
    assert says in str(caught.value)


def there_and_back(obj: Any) -> Any:
    """Through bytes, so that nothing is shared with `obj`."""
    packed = pack(obj)
    skeleton, data = pickle.loads(
        pickle.dumps((packed.skeleton, [bytes_of(t).numpy().tobytes() for t in packed.tensors]))
    )
    tensors = [
        tensor_from(torch.frombuffer(bytearray(raw), dtype=torch.uint8), TensorMeta.of(tensor))
        if raw
        else torch.empty_like(tensor)
        for raw, tensor in zip(data, packed.tensors, strict=True)
    ]
    return unpack(dataclasses.replace(packed, skeleton=skeleton, tensors=tuple(tensors)))


def wire_bytes(obj: Any) -> int:
    return pack(obj).nbytes


# --- structure -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        None,
        True,
        0.1,
        (1, [2.5, None, (True, "text")], {"a": {"b": [b"raw"]}}),
        range(2, 9, 3),
        {1, 2},
        frozenset({"x"}),
        slice(1, None, 2),
        OrderedDict(b=1, a=2),
        torch.Size([1, 2]),
        torch.bfloat16,
        torch.device("cpu"),
        complex(1, -2),
        ((), {}),
        [],
    ],
    ids=repr,
)
def test_plain_values_come_back_equal(obj: Any) -> None:
    back = there_and_back(obj)
    assert back == obj
    assert type(back) is type(obj)


def test_containers_of_tensors_keep_their_types() -> None:
    tensor = torch.randn(3)
    obj = Pair([tensor, (tensor + 1,)], Frozen("f", {"deep": [None, tensor * 2, range(3)]}))
    back = there_and_back(obj)
    assert type(back) is Pair
    assert type(back.second) is Frozen
    assert torch.equal(back.first[0], tensor)
    assert torch.equal(back.first[1][0], tensor + 1)
    assert torch.equal(back.second.value["deep"][1], tensor * 2)
    assert back.second.value["deep"][2] == range(3)


def test_a_set_of_tensors_keeps_them() -> None:
    (back,) = there_and_back({torch.arange(3)})
    assert back.tolist() == [0, 1, 2]


def test_diffusers_outputs_keep_their_class() -> None:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    sample = torch.randn(2, 3)
    back = there_and_back(Transformer2DModelOutput(sample=sample))
    assert type(back) is Transformer2DModelOutput
    assert torch.equal(back.sample, sample)
    assert torch.equal(back["sample"], sample)
    assert torch.equal(back[0], sample)


def test_objects_of_local_classes_travel() -> None:
    class Local:
        def __init__(self, value: Any) -> None:
            self.value = value

    back = there_and_back(Local(torch.ones(2)))
    assert type(back) is Local
    assert back.value.sum() == 2


MAIN_SCRIPT = """
import dataclasses, pathlib, pickle, sys
import torch
from raymod.calls import pack, unpack

@dataclasses.dataclass
class Own:
    value: torch.Tensor

path = pathlib.Path(sys.argv[1])
path.write_bytes(pickle.dumps(pack(Own(torch.arange(3.0)))))
print("ready", flush=True)
input()
back = unpack(pickle.loads(path.read_bytes()))
assert isinstance(back, Own), type(back)
print(back.value.tolist())
"""


def test_a_class_of_main_goes_out_and_comes_back_as_itself(tmp_path: Path) -> None:
    script, wire = tmp_path / "main.py", tmp_path / "wire"
    script.write_text(MAIN_SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), str(wire)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        here = unpack(pickle.loads(wire.read_bytes()))  # this process knows no such class
        here.value += 1
        wire.write_bytes(pickle.dumps(pack(here)))
        out, _ = process.communicate("\n", timeout=60)
    assert out == "[1.0, 2.0, 3.0]\n"


# --- tensors -------------------------------------------------------------------------------------

SPECIAL = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3.5])
ZOO = {
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "int64": torch.tensor([2**62, -1]),
    "fp32": SPECIAL,
    "fp64": SPECIAL.double(),
    "fp16": SPECIAL.half(),
    "bf16": SPECIAL.bfloat16(),
    "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    "complex64": torch.view_as_complex(torch.randn(2, 3, 2)),
    "0-d": torch.tensor(3.5),
    "0-d bf16": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.empty(0),
    "zero-size": torch.empty(2, 0, 3, dtype=torch.float16),
    "transposed": torch.randn(3, 4).t(),
    "strided": torch.randn(4, 6)[:, ::2],
    "expanded": torch.randn(3, 1).expand(3, 5),
    "channels_last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "slice": torch.randn(100)[3:9],
    "conj": torch.view_as_complex(torch.randn(3, 2)).conj(),
    "neg": torch.view_as_complex(torch.randn(3, 2)).conj().imag,
    "parameter": nn.Parameter(torch.randn(2)),
    "frozen parameter": nn.Parameter(torch.randn(2), requires_grad=False),
}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (one, other))
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(bytes_of(one), bytes_of(other))
    )


@pytest.mark.parametrize("name", ZOO)
def test_every_kind_of_tensor_comes_back_bit_for_bit(name: str) -> None:
    tensor = ZOO[name]
    back = there_and_back({"t": [tensor]})["t"][0]
    assert same_bits(back, tensor)
    assert type(back) is type(tensor)
    assert back.is_contiguous()


def test_packed_tensors_are_dense_and_share_memory_where_they_can() -> None:
    dense = torch.randn(4)
    packed = pack([dense, torch.randn(3, 4).t(), torch.ones(2, requires_grad=True) * 2])
    assert packed.tensors[0].data_ptr() == dense.data_ptr()
    assert all(t.is_contiguous() and not t.requires_grad for t in packed.tensors)


def test_the_slice_of_a_large_tensor_is_small() -> None:
    big = torch.zeros(1 << 20)
    assert wire_bytes(big[:4]) < 1000  # pickled, it is 4 MiB
    assert wire_bytes(big[::1000]) < 10_000


def test_inference_tensors_come_back_as_ordinary_ones() -> None:
    with torch.inference_mode():
        tensor = torch.randn(3)
        packed_inside = pack(tensor)
    assert torch.equal(unpack(packed_inside), tensor)
    assert not there_and_back(tensor).is_inference()


def test_requires_grad_is_kept_for_parameters_only() -> None:
    plain = torch.ones(2, requires_grad=True)
    back = there_and_back([plain, plain * 2, nn.Parameter(plain.detach())])
    assert [t.requires_grad for t in back] == [False, False, True]
    assert not there_and_back(ZOO["frozen parameter"]).requires_grad


def test_one_tensor_in_two_places_stays_one() -> None:
    tensor, parameter = torch.randn(3), nn.Parameter(torch.randn(3))
    packed = pack([tensor, {"again": tensor}, parameter, parameter])
    assert len(packed.tensors) == 2
    a, b, c, d = there_and_back([tensor, tensor, parameter, parameter])
    assert a is b
    assert c is d
    assert isinstance(c, nn.Parameter)


def test_tensors_made_while_packing_do_not_mix() -> None:
    class Fresh:
        """Makes its items while it is pickled: ids of freed tensors come again."""

        def __reduce__(self) -> Any:
            return list, (), None, (torch.full((3,), float(i)) for i in range(50))

    assert [tensor[0].item() for tensor in there_and_back(Fresh())] == list(range(50))


def test_modules_keep_ties_dtypes_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module.register_buffer("rope", torch.arange(4.0), persistent=False)
    module.eval()
    back = there_and_back(module)
    assert back[2].weight is back[0].weight
    assert back[1].weight.dtype is torch.bfloat16
    assert back.rope.tolist() == [0, 1, 2, 3]
    assert "rope" not in back.state_dict()
    assert not back.training
    x = torch.randn(2, 3)
    assert torch.equal(back[0](x), module[0](x))


def test_other_layouts_and_subclasses_travel_torchs_way() -> None:
    sparse = torch.eye(3).to_sparse()
    marked = torch.randn(3).as_subclass(Marked)
    back = there_and_back([sparse, torch.empty(2, 3, device="meta"), marked])
    assert back[0].is_sparse
    assert torch.equal(back[0].to_dense(), torch.eye(3))
    assert back[1].is_meta
    assert back[1].shape == (2, 3)
    assert type(back[2]) is Marked
    assert torch.equal(back[2].as_subclass(torch.Tensor), marked.as_subclass(torch.Tensor))


def test_the_result_of_a_collective_is_waited_for() -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.randn(4)
        pending = collectives.all_gather_single(tensor, 0, dist.group.WORLD)
        assert type(pending) is not torch.Tensor  # else this tests nothing
        back = there_and_back({"out": pending})["out"]
        assert type(back) is torch.Tensor
        assert torch.equal(back, tensor)
    finally:
        dist.destroy_process_group()


def test_tensors_land_on_the_device_asked_for() -> None:
    packed = pack([torch.ones(2), nn.Parameter(torch.ones(3))])
    back = unpack(packed, device=torch.device("meta"))
    assert all(t.is_meta for t in back)
    assert isinstance(back[1], nn.Parameter)
    assert all(t.device.type == "cpu" for t in unpack(packed))


# --- what cannot travel --------------------------------------------------------------------------


def test_a_generator_is_refused_by_its_path() -> None:
    call = ((torch.ones(1),), {"extra": {"gen": [torch.Generator()]}})
    with pytest.raises(PackError, match=r"argument kwargs\['extra'\]\['gen'\]\[0\].*Generator"):
        pack(call)


def test_the_path_leads_through_objects_and_modules() -> None:
    lock = threading.Lock()
    with pytest.raises(PackError, match=r"argument args\[1\]\.value\[2\] is a _thread\.lock"):
        pack(((1, Frozen("f", [0, 1, lock])), {}))
    with pytest.raises(PackError, match=r"output\.second is a _thread\.lock"):
        pack(Pair(1, lock), what="output")
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    module[1][0].lock = lock
    with pytest.raises(PackError, match=r"module\.1\.0\.lock is a _thread\.lock"):
        pack(module, what="module")
    with pytest.raises(PackError, match=r"callback\.lock is a _thread\.lock"):
        pack(lambda: lock, what="callback")


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    with path.open() as text, path.open("rb") as raw:
        for file in (text, raw):  # cloudpickle alone would copy the content of a text file
            with pytest.raises(PackError, match=r"argument\['f'\] is a _io\.\w+.*open file"):
                pack({"f": file})


def test_a_self_containing_object_that_fails_is_still_named() -> None:
    loop: list[Any] = [threading.Lock()]
    loop.append(loop)
    with pytest.raises(PackError, match=r"argument\[0\] is a _thread\.lock"):
        pack(loop)


def test_what_cannot_be_imported_is_named() -> None:
    packed = pack(1)
    missing = b"cno_such_module\nThing\n."
    with pytest.raises(PackError, match="no_such_module"):
        unpack(dataclasses.replace(packed, skeleton=missing))


# --- texts and speed -----------------------------------------------------------------------------


def test_describe_reads_like_a_call() -> None:
    kwargs = {
        "hidden_states": torch.zeros(1, 64, 16),
        "shapes": [(1, 2)],
        "scale": 0.5,
        "attention_kwargs": {"mask": torch.zeros(2, dtype=torch.bool)},
        "return_dict": False,
        "name": None,
    }
    assert describe(((torch.zeros(2, dtype=torch.bfloat16),), kwargs)) == (
        "bfloat16[2], hidden_states: float32[1, 64, 16], shapes: [(1, 2)], scale=0.5, "
        "attention_kwargs: {mask: bool[2]}, return_dict=False, name=None"
    )
    assert describe([torch.zeros(1)] * 9).endswith("... 9 in all]")
    assert len(describe({"k": ["x" * 30] * 4}, limit=50)) == 50


def test_packing_a_call_is_cheap() -> None:
    call = ((), {f"tensor_{i}": torch.zeros(64) for i in range(7)} | {"return_dict": False})
    times = []
    for _ in range(200):
        start = time.perf_counter()
        pack(call)
        times.append(time.perf_counter() - start)
    assert min(times) < 200e-6  # about 25e-6 on a quiet core
