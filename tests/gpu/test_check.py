"""The script for a GPU still runs where there is none, and sees what is wrong."""

from __future__ import annotations

import pytest
import torch

from raymod.transport import SharedTransport
from tests.conftest import RayForTests
from tests.gpu import check


@pytest.mark.gang
def test_the_script_runs(ray_session: RayForTests, capsys: pytest.CaptureFixture[str]) -> None:
    code = check.main(["--device", "cpu", "--repeat", "2"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "0 of 7 checks are wrong" in text
    assert text.count("skipped:") == 1  # pinning


def test_a_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "installed", lambda package: False)
    send = SharedTransport.send
    first: list[object] = []

    def send_the_first(self: SharedTransport, packed: object) -> object:
        first.append(packed)
        return send(self, first[0])  # type: ignore[arg-type]

    monkeypatch.setattr(SharedTransport, "send", send_the_first)
    assert check.main(["--device", "cpu", "--repeat", "1"]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert text.count("skipped: ray is not installed") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 1
    assert "sees no GPU" in capsys.readouterr().out
