"""A rank without Ray: alone, and what it finds on its machine."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from raymod.calls import Packed, pack, unpack
from raymod.config import Degrees, ParallelConfig, PrepareConfig
from raymod.errors import ConfigError, RankError
from raymod.transport import RayTransport
from raymod.weights import offer
from raymod.worker import Reply, Worker, group, versions
from raymod.worker.group import serve
from raymod.worker.host import choose_device, interface_of

# Parcels of this size travel in themselves, so nothing here needs Ray.
TRANSPORT = RayTransport(inline_bytes=1 << 20)


class Doubler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor, *, fail: bool = False, nap_s: float = 0.0) -> Any:
        if fail:
            raise LookupError("the doubler was asked to fail")
        time.sleep(nap_s)
        return {"y": x * self.weight}


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A rank of one, ready to serve."""
    worker = Worker(rank=0, world_size=1, node="127.0.0.1", transport=TRANSPORT)
    with offer("auto", Doubler()) as weights:
        worker.load(weights.ticket)
    worker.prepare(degrees=Degrees(), parallel=ParallelConfig(), config=PrepareConfig())
    yield worker
    worker.close()


def forward(worker: Worker, *args: Any, **kwargs: Any) -> Reply:
    return worker.forward(TRANSPORT.send(pack((args, kwargs, (), 0))))


def output(reply: Reply) -> Any:
    assert reply.failure is None, reply.failure
    assert reply.parcel is not None
    return unpack(TRANSPORT.receive(reply.parcel))


def run(worker: Worker, method: Any, *args: Any, replies: bool = True) -> Reply:
    return worker.run(TRANSPORT.send(pack((method, args, {}))), replies=replies)


def test_a_call(worker: Worker) -> None:
    x = torch.randn(3)
    reply = forward(worker, x)
    assert torch.equal(output(reply)["y"], x * 2)
    assert not output(reply)["y"].requires_grad
    assert reply.seconds > 0
    assert worker.health().calls == 1


def test_what_it_raises_is_part_of_the_reply_with_the_shapes(worker: Worker) -> None:
    reply = forward(worker, torch.zeros(3, dtype=torch.bfloat16), fail=True)
    failure = reply.failure
    assert failure is not None
    assert (failure.rank, failure.node, failure.type_name) == (0, "127.0.0.1", "LookupError")
    assert "the doubler was asked to fail" in failure.message
    assert "bfloat16[3], fail=True" in failure.message
    assert "in forward" in failure.traceback
    assert isinstance(failure.exception(), LookupError)
    assert reply.steps == ()
    assert not reply.done
    assert torch.equal(output(forward(worker, torch.ones(3)))["y"], torch.full((3,), 2.0))


def test_a_module_that_ends_the_process_is_a_failure(worker: Worker) -> None:
    worker.module.forward = lambda: sys.exit("enough")  # type: ignore[union-attr]
    failure = forward(worker).failure
    assert failure is not None
    assert failure.type_name == "SystemExit"
    assert failure.message == "enough"
    assert type(RankError.from_failures([failure])) is RankError  # it does not end the driver


def test_an_output_that_cannot_travel(worker: Worker) -> None:
    worker.module.forward = lambda: threading.Lock()  # type: ignore[union-attr]
    reply = forward(worker)
    assert reply.failure is not None
    assert reply.failure.type_name == "raymod.errors.PackError"
    assert reply.done  # the work was done: nobody waits for this rank


def test_what_cannot_be_put_together_here(worker: Worker) -> None:
    skeleton = pack(Doubler()).skeleton.replace(b"Doubler", b"Tripler")
    reply = worker.forward(TRANSPORT.send(Packed(skeleton, ())))
    assert reply.failure is not None
    assert reply.failure.type_name == "raymod.errors.PackError"


def test_a_call_is_made_in_its_cache_contexts(worker: Worker) -> None:
    entered: list[Any] = []

    @contextlib.contextmanager
    def cache_context(name: str, **fields: Any) -> Iterator[None]:
        entered.append((name, fields))
        yield
        entered.append("left")

    worker.module.cache_context = cache_context  # type: ignore[union-attr,assignment]
    contexts = (("cond", {"step_index": 1}), ("inner", {}))
    packed = pack(((torch.ones(3),), {}, contexts, 0))
    output(worker.forward(TRANSPORT.send(packed)))
    assert entered == [("cond", {"step_index": 1}), ("inner", {}), "left", "left"]


def test_another_module_at_its_own_seat(worker: Worker) -> None:
    first = worker.module
    with worker.at(1):
        with offer("auto", nn.ReLU()) as weights:
            worker.load(weights.ticket)
        worker.prepare(degrees=Degrees(), parallel=ParallelConfig(), config=PrepareConfig())
        assert isinstance(worker.module, nn.ReLU)
    assert worker.module is first
    x = torch.tensor([-1.0, 0.0, 1.0])
    packed = TRANSPORT.send(pack(((x,), {}, (), 1)))
    assert torch.equal(output(worker.forward(packed)), x.relu())
    assert torch.equal(output(forward(worker, x))["y"], 2 * x)
    worker.forget(1)
    failure = worker.forward(packed).failure
    assert failure is not None
    assert "call prepare first" in failure.message


def test_functions_and_methods(worker: Worker) -> None:
    assert output(run(worker, lambda w, a: (w.rank, w.world_size, a), 5)) == (0, 1, 5)
    assert output(run(worker, lambda w: (str(w.device), type(w.module).__name__))) == (
        "cpu",
        "Doubler",
    )
    assert output(run(worker, "health")).rank == 0
    assert run(worker, "health", replies=False).parcel is None
    for name in ("_failed", "device", "nothing"):
        failure = run(worker, name).failure
        assert failure is not None
        assert "has no method" in failure.message


def test_answer_runs_a_step_of_the_start(worker: Worker) -> None:
    assert worker.answer("bind", "127.0.0.1").value[0] == "127.0.0.1"
    failure = worker.answer("release").failure
    assert failure is not None
    assert "ConfigError" in failure.type_name


def test_the_order_of_the_start_is_checked() -> None:
    worker = Worker(rank=0, world_size=1, node="n", transport=TRANSPORT)
    with pytest.raises(ConfigError, match="call load first"):
        worker.prepare(degrees=Degrees(), parallel=ParallelConfig(), config=PrepareConfig())
    failure = forward(worker).failure
    assert failure is not None
    assert "call prepare first" in failure.message


def test_health_tells_what_it_is_doing(worker: Worker) -> None:
    thread = threading.Thread(target=forward, args=(worker, torch.ones(3)), kwargs={"nap_s": 1.0})
    thread.start()
    deadline = time.monotonic() + 10
    while worker.health().state == "idle" and time.monotonic() < deadline:
        time.sleep(0.01)
    busy = worker.health()
    thread.join()
    assert busy.state == "forward"
    assert 0 <= busy.busy_s < 10
    assert busy.rss_bytes > 1 << 20
    assert worker.health().state == "idle"


def test_closing_twice_is_not_worse(worker: Worker) -> None:
    worker.close()
    worker.close()
    assert worker.module is None


def test_hello_sets_its_own_rank(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "99", "WORLD_SIZE": "99", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "99")
    info = worker.hello()
    import os

    assert {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_PORT": None,
    }
    assert (info.rank, info.device, info.pid) == (0, "cpu", os.getpid())
    assert info.versions == versions()
    # of a build for GPUs, torch names it in its own version only
    assert info.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "count", "device", "warned"),
    [
        ((), None, 8, "cpu", False),
        (("3",), "3", 1, "cuda:0", False),  # Ray shows it its own GPU only
        (("10",), "10", 1, "cuda:0", False),
        (("3",), "0,1,2,3", 4, "cuda:3", False),  # it sees all of its node's
        (("6",), "4,6", 2, "cuda:1", False),  # all of those that Ray was given
        (("3",), None, 8, "cuda:3", False),
        (("GPU-aa",), "GPU-aa", 1, "cuda:0", False),
        (("3",), "GPU-aa", 1, "cuda:0", False),  # the same one, by another name
        (("3",), None, 2, "cuda:0", True),
        (("0",), "0", 0, "cpu", True),
    ],
)
def test_the_device_is_the_one_that_ray_gave(
    gpu_ids: tuple[str, ...], visible: str | None, count: int, device: str, warned: bool
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found, warnings = choose_device(gpu_ids, environ, count)
    assert str(found) == device
    assert bool(warnings) == warned
    assert environ == ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def test_the_store_listens_on_its_address_only() -> None:
    _store, port = serve("127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    with socket.socket() as other:  # free on every other address of this machine
        other.bind(("127.0.0.2", port))


def test_the_stores_port_is_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that wants the port between bind and serve does not get it."""
    refused: list[int] = []

    def contended(address: str, port: int, **options: Any) -> Any:
        with socket.socket() as contender:
            try:
                contender.bind((address, port))
                contender.listen()
                return TCPStore(address, port, **options)
            except OSError:
                refused.append(port)
        return TCPStore(address, port, **options)

    monkeypatch.setattr(group, "TCPStore", contended)
    stores = [serve("127.0.0.1") for _ in range(5)]
    assert refused == [port for _, port in stores]
    for store, _ in stores:
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_store_leaves_nothing_when_it_cannot_listen() -> None:
    with pytest.raises(OSError, match=r"."):
        serve("203.0.113.9")  # of nobody


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
