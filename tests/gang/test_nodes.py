"""Gangs over several nodes with GPUs that only Ray believes in: two Ray nodes and a head here."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util import placement_group, remove_placement_group
from torch import nn

from raymod import weights
from raymod.config import Degrees, GangConfig
from raymod.gang import Gang, default_world_size
from raymod.weights import MemoryTicket, Offer, Piece
from tests.conftest import RayForTests
from tests.gang.helpers import start, wait_for

pytestmark = [
    pytest.mark.gang,
    # no GPU is really there, and a scalar has no batch to divide
    pytest.mark.filterwarnings("ignore:Ray reserved GPU:UserWarning"),
    pytest.mark.filterwarnings("ignore:batch_degree=:UserWarning"),
]

X = torch.tensor(2.0)
STORE = 100 << 20


@pytest.fixture(scope="module")
def cluster(ray_for_tests: RayForTests) -> Iterator[Cluster]:
    """A head without GPUs, where the driver is, and two nodes with two each."""
    ray_for_tests.stop()
    head = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster()
    try:
        cluster.add_node(**head)
        for _ in range(2):
            cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=STORE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _placed(worker: Any) -> dict[str, Any]:
    import torch.distributed as dist

    return {
        "node": ray.get_runtime_context().get_node_id(),
        "gpus": tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"]),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "device": str(worker.device),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "store": getattr(worker._store, "host", None),
        "backend": dist.get_backend(),
    }


def test_a_gang_over_nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """R03, R04, R11, R12, R15: no GPU where the driver is; addresses are Ray's, of rank 0."""
    for name in ("gethostbyname", "getfqdn", "gethostname"):
        monkeypatch.setattr(socket, name, lambda *args: "203.0.113.9")
    assert default_world_size(GangConfig()) == 4
    with start(ranks=4) as gang:
        assert float(gang.call((X,), {})) == 2 * 4 * 4 * 3
        infos = gang.report.ranks
        placed = gang.call_all(_placed)
    driver = ray.get_runtime_context().get_node_id()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = [place["node"] for place in placed]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert driver not in nodes
    assert [place["gpus"] for place in placed] == [("0",), ("1",)] * 2
    assert [place["visible"] for place in placed] == ["0", "1"] * 2
    for info, place in zip(infos, placed, strict=True):
        assert info.node_id == place["node"]
        assert info.node_address == addresses[place["node"]]
        assert info.gpu_ids == place["gpus"]
        assert "Ray reserved GPU" in info.warnings[0]
        assert place["device"] == "cpu"
        assert place["interface"] not in (None, "lo")
    assert placed[0]["store"] == addresses[nodes[0]]
    assert not addresses[nodes[0]].startswith("127.")
    assert [place["store"] for place in placed[1:]] == [None] * 3


def test_all_gpus_of_a_node_can_be_visible(cluster: Cluster) -> None:  # R15, R16
    with start(all_gpus_visible=True, self_test=False) as gang:
        placed = gang.call_all(_placed)
    assert [place["gpus"] for place in placed] == [("0",), ("1",)]
    assert placed[0]["node"] == placed[1]["node"]
    assert [place["visible"] for place in placed] == [None, None]
    assert [place["interface"] for place in placed] == ["lo", "lo"]
    assert placed[0]["store"] == "127.0.0.1"


def test_fractional_gpus_in_a_given_group(cluster: Cluster) -> None:  # R19
    assert default_world_size(GangConfig(gpus_per_rank=0.5)) == 8
    group = placement_group([{"CPU": 0.5, "GPU": 1}] * 2, strategy="STRICT_PACK")
    assert group.wait(30)
    try:
        with start(placement_group=group, bundle_indices=(1, 0), gpus_per_rank=0.5) as gang:
            assert len({info.node_id for info in gang.report.ranks}) == 1
            free = ray.available_resources()
            assert [v for k, v in free.items() if k.startswith("GPU_group_0")] == [0.5]
            assert float(gang.call((X,), {})) == 24
    finally:
        remove_placement_group(group)


class FarOffer(Offer):
    """An offer whose file no rank can open."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.sent = 0

    @property
    def ticket(self) -> MemoryTicket:
        ticket = self.offer.ticket
        assert isinstance(ticket, MemoryTicket)
        return replace(ticket, file=replace(ticket.file, path="/nowhere"))

    def pieces(self, piece_bytes: int = 1 << 20) -> Iterator[Piece]:
        for piece in self.offer.pieces(min(piece_bytes, 1 << 20)):
            self.sent += 1
            yield piece


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randint(-9, 9, (300, 1000)).float()  # sums are exact, in any order
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight.sum() for weight in self.weights])


@pytest.mark.filterwarnings("ignore:Wide does not say:UserWarning")
def test_weights_reach_nodes_that_cannot_open_the_file(cluster: Cluster) -> None:
    module = Wide()
    with weights.offer("auto", module) as near:
        offer = FarOffer(near)
        gang = Gang.start(
            degrees=Degrees(batch_degree=4),
            load=offer,
            config=GangConfig(start_timeout_s=120),
            progress=lambda phase: None,
        )
    with gang:
        found = gang.call_all(lambda worker: [weight.sum() for weight in worker.module.weights])
        receivers = gang.call_all(lambda worker: worker._receiver)
    assert 5 <= offer.sent < 10  # 4.8 MB in pieces of at most 1 MiB, once for all nodes
    assert found == [[weight.sum() for weight in module.weights]] * 4
    assert receivers == [None] * 4


def test_a_node_may_join_late(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:  # R02
    caplog.set_level(logging.INFO, logger="raymod")
    gangs: list[Gang] = []

    def begin() -> None:
        gangs.append(start(ranks=3, progress=None, placement_strategy="STRICT_PACK"))

    thread = threading.Thread(target=begin)
    thread.start()
    time.sleep(3)
    node = cluster.add_node(num_cpus=1, num_gpus=3, object_store_memory=STORE)
    thread.join(150)
    try:
        (gang,) = gangs
        assert {info.node_id for info in gang.report.ranks} == {node.node_id}
        assert [info.gpu_ids for info in gang.report.ranks] == [("0",), ("1",), ("2",)]
        gang.close()
    finally:
        cluster.remove_node(node)
    waiting = [r.getMessage() for r in caplog.records if "waiting for devices (" in r.getMessage()]
    assert waiting
    assert "3 ranks want" in waiting[0]
    assert "the cluster has 4 of 4 GPU" in waiting[0]
    assert wait_for(lambda: ray.cluster_resources()["GPU"] == 4)
