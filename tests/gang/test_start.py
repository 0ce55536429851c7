"""How a gang starts in a Ray that is there already: a user's own, without GPUs."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util import placement_group, placement_group_table, remove_placement_group

from raymod.config import GangConfig
from raymod.errors import (
    CapacityError,
    ConfigError,
    GangStartError,
    RankError,
    StartTimeoutError,
    WeightsError,
)
from raymod.gang import Gang, default_world_size
from tests.conftest import RayForTests
from tests.gang.helpers import (
    Plain,
    Probe,
    environ,
    is_running,
    pids,
    placement_groups,
    start,
    wait_for,
)

pytestmark = [
    pytest.mark.gang,
    pytest.mark.usefixtures("ray_session"),
    # a scalar has no batch to divide
    pytest.mark.filterwarnings("ignore:batch_degree=2:UserWarning"),
]

X = torch.tensor(2.0)


@pytest.fixture(autouse=True)
def nothing_left(ray_session: RayForTests) -> Iterator[None]:
    """What was free before a test is free after it, and its placement groups are gone."""
    free = ray.available_resources().get("CPU", 0)
    groups = placement_groups()
    yield
    assert wait_for(lambda: placement_groups() == groups), placement_group_table()
    assert wait_for(lambda: ray.available_resources().get("CPU", 0) >= free)


def test_more_than_there_is_is_said_within_the_limit() -> None:  # R01
    began = time.monotonic()
    with pytest.raises(CapacityError) as caught:
        start(gpus_per_rank=1, start_timeout_s=2)
    assert time.monotonic() - began < 10
    text = str(caught.value)
    assert "2 ranks want 0.02 CPU and 2 GPU" in text
    assert "0 of 0 GPU and" in text
    assert "of 4 CPU free on 1 node" in text


def test_the_start_says_what_it_does_and_the_ranks_nothing(  # R141, R142
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="raymod")
    with start(progress=None) as gang:
        assert gang.report.split == "by batch over 2"
        assert set(gang.report.phases) == {
            "placing", "starting", "joining", "loading", "splitting", "ready"
        }  # fmt: skip
        assert [info.rank for info in gang.report.ranks] == [0, 1]
        assert gang.call_all(_noise) == [(logging.WARNING, True), (logging.ERROR, False)]
    assert not any(is_running(pid) for pid in pids(gang))
    assert ray.is_initialized()  # it was the user's
    assert capfd.readouterr() == ("", "")
    said = [record.getMessage() for record in caplog.records if record.name == "raymod"]
    assert [text for text in said if " s)" not in text][:-1] == [
        "waiting for devices",
        "starting the ranks",
        "joining the ranks",
        "moving the weights",
        "splitting the model",
    ]
    assert said[-1].startswith("ready after ")


def test_the_environment_of_the_ranks(  # R06, R07, R21
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node_has = {"HF_HUB_OFFLINE": "1"}
    driver = {
        "HF_HOME": "/driver/cache",
        "HF_TOKEN": "hf_secret",
        "HF_HUB_OFFLINE": "0",
        "RAYMOD_X": "driver",
        "RAYMOD_Y": "driver",
        "UNRELATED": "driver",
        "RANK": "99",
        "WORLD_SIZE": "99",
        "LOCAL_RANK": "99",
        "MASTER_ADDR": "203.0.113.9",
        "MASTER_PORT": "1",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    for name, value in driver.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG)
    names = (*driver, "RAYMOD_Z")
    gang = start(
        runtime_env={"env_vars": {"RAYMOD_Z": "user", **node_has}}, env_vars={"RAYMOD_Y": "user"}
    )
    with gang:
        found = gang.call_all(environ, names)
        assert float(gang.call((X,), {})) == 4 * 2 * 3.0
    for rank in (0, 1):
        assert {k: v for k, v in found[rank].items() if k != "CUDA_VISIBLE_DEVICES"} == {
            "HF_HOME": "/driver/cache",
            "HF_TOKEN": "hf_secret",
            "HF_HUB_OFFLINE": "1",  # the rank had it already
            "RAYMOD_X": "driver",
            "RAYMOD_Y": "user",
            "RAYMOD_Z": "user",
            "UNRELATED": None,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": None,
            "MASTER_PORT": None,
        }
        assert found[rank]["CUDA_VISIBLE_DEVICES"] != "7"
    assert "HF_TOKEN" in caplog.text
    assert "hf_secret" not in caplog.text


def test_forwarded_values_win_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYMOD_X", "driver")
    config: dict[str, Any] = {"runtime_env": {"env_vars": {"RAYMOD_X": "node"}}}
    with start(Plain(), ranks=1, overwrite_env=True, **config) as gang:
        assert gang.call_all(environ, ("RAYMOD_X",)) == [{"RAYMOD_X": "driver"}]


def test_two_gangs_start_at_once() -> None:  # R09: each rank 0 has its own port
    gangs: list[Gang] = []
    threads = [threading.Thread(target=lambda: gangs.append(start())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert len(gangs) == 2
    for gang in gangs:
        assert float(gang.call((X,), {})) == 24
        gang.close()


def test_a_given_placement_group_is_used_and_stays() -> None:  # R19
    group = placement_group([{"CPU": 0.5}] * 4)
    assert group.wait(30)
    try:
        with start(placement_group=group, bundle_indices=(3, 2)) as gang:
            assert gang.call_all(_bundle) == [3, 2]
        assert placement_group_table(group)["state"] == "CREATED"
        with pytest.raises(ConfigError, match="there is no bundle 4"):
            start(placement_group=group, bundle_indices=(0, 4))
        with pytest.raises(ConfigError, match="3 bundle_indices"):
            start(placement_group=group, bundle_indices=(0, 1, 2))
        with pytest.raises(ConfigError, match=r"2 CPU a rank, but a bundle .* has 0\.5"):
            start(placement_group=group, cpus_per_rank=2)
    finally:
        remove_placement_group(group)
    with pytest.raises(ConfigError, match="not a str"):
        start(placement_group="mine")


def _bundle(worker: Any) -> int:
    import ray

    names = ray._private.worker.global_worker.core_worker.resource_ids()
    return next(int(n.split("_")[2]) for n in names if re.fullmatch(r"bundle_group_\d+_\w+", n))


@pytest.fixture
def hidden_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that only the driver finds."""
    name = "hidden_transformer"
    code = "import torch\nclass Hidden(torch.nn.Module):\n    def forward(self, x): return x + 1\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_class_from_a_path_that_was_set_at_run_time(hidden_module: str) -> None:  # R20
    with start(__import__(hidden_module).Hidden(), ranks=1) as gang:
        assert float(gang.call((X,), {})) == 3


def test_a_class_that_nobody_could_import_again(  # R20
    hidden_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__(hidden_module).Hidden()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    with start(module, ranks=1) as gang:
        assert float(gang.call((X,), {})) == 3


def test_a_class_that_the_ranks_cannot_import(hidden_module: str, tmp_path: Path) -> None:  # R20
    module = __import__(hidden_module).Hidden()
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT.replace("NAME", hidden_module))
    path = os.pathsep.join((str(folder), os.environ["PYTHONPATH"]))
    with pytest.raises(GangStartError) as caught:
        start(module, ranks=1, env_vars={"PYTHONPATH": path})
    assert "No module named 'hidden_transformer'" in str(caught.value)
    assert "PYTHONPATH" in str(caught.value)
    assert isinstance(caught.value, WeightsError)
    assert isinstance(caught.value.__cause__, WeightsError)


def test_a_package_that_the_ranks_lack(tmp_path: Path) -> None:  # R22
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libshim.so: cannot open shared object file', name='torch')"
    )
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    with pytest.raises(GangStartError, match=r"rank 0 .*ImportError: libshim\.so") as caught:
        start(ranks=1, env_vars={"PYTHONPATH": path})
    assert isinstance(caught.value.__cause__, ImportError)
    assert caught.value.__cause__.name == "torch"


WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "NAME":
            raise ModuleNotFoundError("No module named 'NAME'", name="NAME")

sys.meta_path.insert(0, Without())
"""


def test_raymod_itself_may_be_what_the_ranks_lack(tmp_path: Path) -> None:  # R22
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.replace("NAME", "raymod"))
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    with pytest.raises(GangStartError, match="The ranks cannot import 'raymod'") as caught:
        start(ranks=1, env_vars={"PYTHONPATH": path})
    assert isinstance(caught.value.__cause__, ImportError)


def test_other_versions_are_refused(tmp_path: Path) -> None:  # R22
    folder = tmp_path / "diffusers-9.9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 9.9.9\n")
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    with pytest.raises(GangStartError, match=r"diffusers is \S+ here and 9\.9\.9 there"):
        start(ranks=1, env_vars={"PYTHONPATH": path})


def test_a_first_collective_that_fails_comes_with_advice() -> None:  # R17
    with pytest.raises(GangStartError, match="GLOO_SOCKET_IFNAME") as caught:
        start(env_vars={"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert "nowhere0" in str(caught.value)
    assert "self_test=False" in str(caught.value)


def test_a_rank_that_fails_to_load_ends_the_start(tmp_path: Path) -> None:  # R125
    def load() -> Probe:
        note = {"rank": os.environ["RANK"], "pid": os.getpid()}
        Path(tmp_path, note["rank"]).write_text(json.dumps(note))
        if note["rank"] == "1":
            raise OSError("no such checkpoint")
        return Probe()

    with pytest.raises(GangStartError, match=r"rank 1 .* no such checkpoint") as caught:
        start(load=load)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, RankError)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.rank == 1
    notes = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert len(notes) == 2
    assert not any(is_running(note["pid"]) for note in notes)


def test_ranks_that_do_not_get_ready_end_the_start(tmp_path: Path) -> None:  # R122
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(600)")
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    began = time.monotonic()
    with pytest.raises(StartTimeoutError) as caught:
        start(env_vars={"PYTHONPATH": path}, start_timeout_s=8)
    assert 8 <= time.monotonic() - began < 20
    text = str(caught.value)
    assert "in the phase 'starting', rank 0 on node" in text
    assert ", rank 1 on node" in text
    assert "start_timeout_s=8" in text


def test_without_gpus_two_ranks_are_the_default() -> None:
    assert default_world_size(GangConfig()) == 2


def _noise(worker: Any) -> tuple[int, bool]:
    """Level of a library's logger on the rank; whether a warning is shown."""
    import warnings

    import diffusers.utils.logging as library

    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("noise", UserWarning, stacklevel=1)
    return library.get_verbosity(), bool(caught)
