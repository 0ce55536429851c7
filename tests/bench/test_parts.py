"""The parts of the benchmark still fit what they measure; their figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from raymod.bench import calls, model, peer, startup
from raymod.bench.spmd import spmd
from raymod.cli import main
from raymod.demo import model_path
from raymod.errors import ConfigError
from tests.conftest import RayForTests

pytestmark = pytest.mark.filterwarnings("ignore:batch_degree=2:UserWarning")


@pytest.mark.gang
def test_each_way_to_call_is_measured(ray_session: RayForTests) -> None:
    names = ("raymod", "peer") if peer.is_installed() else ("raymod",)
    with calls.ways((*names, "peer")) as ways:
        found = calls.measure(ways, lambda: (torch.randn(1, 9000),), rounds=2, each=2)
    assert set(found) == {"floor", *names}
    assert {times["count"] for times in found.values()} == {4}
    assert all(times["median"] > 0 for times in found.values())
    assert found["raymod"]["parts"]["sent_bytes"] > 36_000
    assert "parts" not in found["floor"]


def test_the_same_split_runs_in_plain_processes() -> None:
    with spmd(2, image=(4, 4), text=8, blocks=1) as step:
        seconds = [step() for _ in range(3)]
    assert all(0 < each < 60 for each in seconds)


def test_the_large_model_has_the_size_asked_for() -> None:
    module = model.large(150)
    assert sum(parameter.nbytes for parameter in module.parameters()) == pytest.approx(
        150e6, rel=0.1
    )
    with torch.no_grad():
        output = module(**model.inputs(image=(8, 8), text=16, dtype=torch.bfloat16))[0]
    assert output.dtype is torch.bfloat16
    assert output.isfinite().all()


@pytest.mark.gang
def test_a_start_is_measured(ray_session: RayForTests, tmp_path: Path) -> None:
    made = startup.child("make", tmp_path, 100, 1)
    found = startup.child("skeleton", tmp_path, 100, 1)
    (run,) = found["runs"]
    assert made["weights_bytes"] == pytest.approx(100e6, rel=0.25)
    assert found["spilled_mb"] == 0
    assert 0 < run["wrap_s"] < run["first_s"]
    assert 0 < run["ready_s"] < run["wrap_s"]
    assert isinstance(run["used_mb"], float)  # of the whole machine: others may free more meanwhile


@pytest.mark.gang
def test_the_command_writes_its_figures(
    ray_session: RayForTests, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "figures"
    assert main(["bench", "--quick", "--only", "calls,step,memory", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    found = json.loads(output.with_suffix(".json").read_text())
    assert [row["part"] for row in found["rows"]] == ["calls"] * 5 + ["step"] + ["memory"] * 4
    for row in found["rows"]:
        assert row["cells"][0] in text
    assert "figures say nothing" in text
    assert found["step"]["difference"] < 1e-5
    assert found["calls"]["payloads"]["flux-1024"]["raymod"]["parts"]["reused_bytes"] == 4194304
    assert output.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.gang
def test_a_pipeline_of_the_users_is_measured(
    ray_session: RayForTests, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "own"
    arguments = json.dumps({"height": 32, "width": 32, "max_sequence_length": 16})
    command = ["bench", "--model", str(model_path()), "--steps", "3", "--workers", "2"]
    assert main([*command, "--arguments", arguments, "--output", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(output.with_suffix(".json").read_text())
    assert found["difference"] < 1e-4
    assert found["local"]["count"] == found["raymod"]["count"] == 2
    assert found["parts"]["total_s"] > found["parts"]["pack_s"] > 0


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["--output", "missing/figures"], "there is no folder"),
        (["--model", "nowhere/at/all"], "diffusers cannot load a pipeline from nowhere/at/all"),
        (["--model", "nowhere", "--steps", "1"], "steps must be at least 2"),
        (["--model", "nowhere", "--dtype", "bf15"], "torch has no dtype 'bf15'"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    command: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *command]) == 2
    assert text in capsys.readouterr().err


def test_a_part_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--only", "calls,speed"])
    assert "there is no part 'speed'" in capsys.readouterr().err


@pytest.mark.gang
def test_the_peer_does_not_wait_for_cpus_that_are_not_there(
    ray_session: RayForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_CPUS_LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match="needs 999 CPUs of Ray"):
        peer._check_cpus(999)
    peer._check_cpus(1)
