"""The transport through Ray's object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from raymod.calls import pack
from raymod.errors import CallTimeoutError
from raymod.transport import Parcel, RayTransport, Transport
from raymod.transport.store import _Stored
from tests.conftest import RayForTests
from tests.transport.conformance import TransportConformance
from tests.transport.unchanged import UnchangedConformance


def references() -> set[bytes]:
    """The objects that this process keeps alive in Ray."""
    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


class Receiver:
    def probe(self, parcel: Parcel, probe: Callable[[Transport, Parcel], Any]) -> Any:
        return probe(RayTransport(), parcel)

    def reply(self, make: Callable[[], Any]) -> Parcel:
        return RayTransport().reply(pack(make()))


class RayLink:
    transport: Transport = RayTransport()

    def __init__(self) -> None:
        actor = ray.remote(num_cpus=0)(Receiver)
        self.receivers = [actor.remote() for _ in range(2)]
        self.on_receivers(Parcel((), 0, ()), lambda transport, parcel: None)
        self.before = references()

    def on_receivers(self, parcel: Parcel, probe: Callable[[Transport, Parcel], Any]) -> list[Any]:
        return ray.get([r.probe.remote(parcel, probe) for r in self.receivers], timeout=60)

    def reply(self, make: Callable[[], Any]) -> Parcel:
        return ray.get(self.receivers[0].reply.remote(make), timeout=60)

    def left_over(self) -> int:
        return len(references() - self.before)

    def close(self) -> None:
        for receiver in self.receivers:
            ray.kill(receiver)


@pytest.fixture(scope="module")
def ray_link(ray_for_tests: RayForTests) -> Iterator[RayLink]:
    ray_for_tests.ensure()
    link = RayLink()
    yield link
    link.close()


class TestRayTransport(TransportConformance):
    def held_bytes(self, link: Any) -> int:
        return sum(put.nbytes for put in link.transport._kept)

    @pytest.fixture
    def link(self, ray_link: RayLink) -> RayLink:
        return ray_link


class TestUnchanged(UnchangedConformance):
    @pytest.fixture
    def link(self, ray_link: RayLink) -> RayLink:
        return ray_link


def test_what_is_kept_for_later_parcels_is_bounded(ray_link: RayLink) -> None:
    ray_link.transport.forget()
    before = ray_link.left_over()
    for size in [*range(100_000, 1_000_000, 50_000), 30 << 20, 100_000]:
        ray_link.transport.send(pack([torch.zeros(size), torch.ones(size)]))
        assert ray_link.left_over() <= before + 4
    ray_link.transport.forget()


def test_small_parcels_need_no_store(ray_link: RayLink) -> None:
    before = ray_link.left_over()
    parcel = ray_link.transport.send(pack(torch.zeros(1000)))
    assert ray_link.left_over() == before
    assert parcel.nbytes >= 4000


def test_a_large_parcel_is_stored_once_for_all(ray_link: RayLink) -> None:
    ray_link.transport.forget()
    before = ray_link.left_over()
    parcel = ray_link.transport.send(pack([torch.zeros(1 << 20), torch.zeros(1 << 20)]))
    ray_link.on_receivers(parcel, lambda transport, parcel: transport.receive(parcel).nbytes)
    assert ray_link.left_over() == before + 1


def test_a_dropped_parcel_is_gone_from_the_store(ray_link: RayLink) -> None:
    ray_link.transport.forget()
    parcel = ray_link.transport.send(pack(torch.zeros(1 << 20)))
    ray_link.on_receivers(parcel, lambda transport, parcel: transport.receive(parcel).nbytes)
    ray_link.transport.forget()
    name = parcel.payload.fresh.binary()

    def exists() -> bool:
        ref = ray.ObjectRef(name)
        return bool(ray._private.worker.global_worker.core_worker.object_exists(ref))

    assert exists()
    del parcel
    deadline = time.monotonic() + 10
    while exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not exists()


def test_waiting_for_bytes_has_a_limit(ray_session: RayForTests) -> None:
    @ray.remote(num_cpus=0)
    def never() -> None:
        time.sleep(60)

    ref = never.remote()
    with pytest.raises(CallTimeoutError, match=r"did not arrive .* within 0\.2 s"):
        RayTransport(timeout_s=0.2).receive(Parcel((), 0, _Stored(ref, (), ())))
    ray.cancel(ref, force=True)
