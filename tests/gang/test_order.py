"""Who becomes which rank, and what each asks for: no Ray."""

from __future__ import annotations

import random
import time

import pytest

from raymod.config import GangConfig
from raymod.gang import placement
from raymod.gang.environment import NOSET, forwarded, runtime_env
from raymod.gang.placement import Spot, Wanted, cpu_share, in_rank_order


def spot(slot: int, node: str, *gpus: str) -> Spot:
    return Spot(slot=slot, node_id=node, node_address=node, gpu_ids=gpus, pid=1, host="")


def test_ranks_go_by_node_and_gpu_number() -> None:
    spots = [spot(slot, "b", str(gpu)) for slot, gpu in enumerate(range(12))]
    spots += [spot(12 + slot, "a", str(gpu)) for slot, gpu in enumerate(range(2))]
    random.Random(0).shuffle(spots)
    ordered = in_rank_order(spots, driver_node="c", ordered=False)
    assert [(s.node_id, s.gpu_ids[0]) for s in ordered] == [
        ("a", "0"),
        ("a", "1"),
        *(("b", str(gpu)) for gpu in range(12)),
    ]


def test_the_drivers_node_comes_first() -> None:
    spots = [spot(0, "a", "0"), spot(1, "b", "0"), spot(2, "b", "1")]
    ordered = in_rank_order(spots, driver_node="b", ordered=False)
    assert [s.slot for s in ordered] == [1, 2, 0]


def test_named_bundles_are_the_rank_order() -> None:
    spots = [spot(0, "b", "1"), spot(1, "a", "0")]
    assert in_rank_order(spots, driver_node="a", ordered=True) == spots


def test_gpus_with_names_have_an_order_too() -> None:
    spots = [spot(0, "a", "GPU-b"), spot(1, "a", "3"), spot(2, "a", "GPU-a")]
    ordered = in_rank_order(spots, driver_node="", ordered=False)
    assert [s.gpu_ids[0] for s in ordered] == ["3", "GPU-a", "GPU-b"]


@pytest.mark.parametrize(
    ("nodes", "count", "free", "gpus", "share"),
    [
        ([{"CPU": 2}], 4, 2, 0, 0.25),  # 4 ranks on 2 CPUs, and half of them left
        ([{"CPU": 2}], 2, 1, 0, 0.25),  # beside another gang
        ([{"CPU": 64, "GPU": 8}], 8, 64, 1, 1.0),
        ([{"CPU": 4, "GPU": 1}, {"CPU": 2, "GPU": 3}], 4, 6, 1, 0.25),  # 3 ranks on 2 CPUs
        ([{"CPU": 2}], 4, 0, 0, 0.01),
        ([{"CPU": 8, "GPU": 1}], 4, 8, 1, 0.01),  # nodes with more GPUs may have few CPUs
    ],
)
def test_cpus_of_a_rank(
    nodes: list[dict[str, float]], count: int, free: float, gpus: float, share: float
) -> None:
    assert cpu_share(nodes, count, free=free, gpus=gpus, strategy="PACK") == share


def test_on_one_node_the_share_fits_one_node() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 4.0}]
    assert cpu_share(nodes, 4, free=8, gpus=0, strategy="PACK") == 1.0
    assert cpu_share(nodes, 4, free=8, gpus=0, strategy="STRICT_PACK") == 0.5


def test_what_is_wanted_in_words() -> None:
    wanted = Wanted(count=2, cpus=0.5, gpus=1, strategy="PACK")
    assert str(wanted) == "2 ranks want 1 CPU and 2 GPU (0.5 CPU + 1 GPU each, PACK)"
    assert Wanted(count=1, cpus=0, gpus=0, strategy="PACK").bundle == {"CPU": 0.01}


def test_a_node_that_is_not_registered_yet_is_waited_for(  # R24
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = {"Alive": True, "Resources": {}}
    ready = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}
    answers = [[], [empty], [{**ready, "Alive": False}], [empty, ready]]
    monkeypatch.setattr(placement.ray, "nodes", lambda: answers.pop(0))
    monkeypatch.setattr(placement.ray, "available_resources", lambda: {"CPU": 8.0})
    wanted = placement.decide(GangConfig(), 2, deadline=time.monotonic() + 10)
    assert (wanted.gpus, wanted.cpus, answers) == (1.0, 1.0, [])


ENVIRON = {
    "HF_HOME": "/cache",
    "HUGGINGFACE_HUB_CACHE": "/cache",
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth7",
    "TORCH_LOGS": "x",
    "CUDA_LAUNCH_BLOCKING": "1",
    "RAYMOD_X": "1",
    # what tells processes and machines apart
    "CUDA_VISIBLE_DEVICES": "7",
    "CUDA_HOME": "/cuda",
    "RANK": "99",
    "WORLD_SIZE": "99",
    "LOCAL_RANK": "99",
    "MASTER_ADDR": "nowhere",
    "MASTER_PORT": "1",
    "RAY_ADDRESS": "nowhere",
    "TORCH_HOST_IP": "203.0.113.9",
    "HOME": "/me",
    "PATH": "/bin",
}


def test_what_is_forwarded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="raymod")
    chosen = forwarded(GangConfig(), ENVIRON | {"HF_TOKEN": "hf_secret"})
    assert set(chosen) == {
        "HF_HOME",
        "HUGGINGFACE_HUB_CACHE",
        "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAME",
        "TORCH_LOGS",
        "CUDA_LAUNCH_BLOCKING",
        "RAYMOD_X",
        "HF_TOKEN",
    }
    assert "HF_TOKEN" in caplog.text
    assert "hf_secret" not in caplog.text


def test_nothing_is_forwarded_if_so_wished() -> None:
    assert forwarded(GangConfig(forward_env=False), ENVIRON) == {}
    own = GangConfig(env_vars={"HF_HOME": "/mine"})
    assert "HF_HOME" not in forwarded(own, ENVIRON)


def test_the_runtime_env_is_the_users_with_env_vars_on_top() -> None:
    given = {"env_vars": {"A": "1", "B": "1"}, "working_dir": "."}
    config = GangConfig(runtime_env=given, env_vars={"B": "2"}, all_gpus_visible=True)
    assert runtime_env(config) == {"env_vars": {"A": "1", "B": "2", NOSET: "1"}, "working_dir": "."}
    assert given["env_vars"] == {"A": "1", "B": "1"}
    assert runtime_env(GangConfig()) == {}
