"""Weights between processes: isolation, sharing, and what a killed driver leaves behind."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from raymod import weights
from raymod.errors import WeightsError
from raymod.machine import TOKEN_BYTES
from raymod.weights import limits
from tests.weights import ranks
from tests.weights.ranks import Rank, digest_of
from tests.weights.test_offer import Zoo

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")

Ranks = tuple[Rank, Rank]
MiB = 1 << 20


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "disk":
        monkeypatch.setattr(limits, "available_memory_bytes", lambda: 0)
    return str(request.param)


def test_an_edit_on_one_rank_is_seen_by_nobody_else(two_ranks: Ranks, place: str) -> None:
    module = Zoo()
    original = digest_of(module)
    one, other = two_ranks
    with weights.offer("auto", module) as offered:
        ticket = offered.ticket
        assert one.do(ranks.load, ticket) == other.do(ranks.load, ticket) == original
        one.do(ranks.edit)
        assert one.do(ranks.digest) != original
        assert other.do(ranks.digest) == original
        assert other.do(ranks.load, ticket, "again") == original
        assert digest_of(module) == original
    assert other.do(ranks.digest) == original  # also once the offer is closed


def test_ranks_that_cannot_open_the_file_get_the_same_in_pieces(two_ranks: Ranks) -> None:
    module = Zoo()
    one, other = two_ranks
    with weights.offer("auto", module) as offered:
        far = dataclasses.replace(
            offered.ticket, file=dataclasses.replace(offered.ticket.file, path="/proc/1/fd/9999")
        )
        assert [rank.do(weights.can_open, far) for rank in two_ranks] == [False, False]
        with pytest.raises(weights.CannotOpenError):
            one.do(ranks.load, far)
        one.do(ranks.start_receiving, far)
        for piece in offered.pieces(4000):
            one.do(ranks.receive, piece)
    ticket = one.do(ranks.received)
    assert [rank.do(weights.can_open, ticket) for rank in two_ranks] == [True, True]
    assert one.do(ranks.load, ticket) == other.do(ranks.load, ticket) == digest_of(module)
    one.do(ranks.stop_receiving)
    one.do(ranks.edit)
    assert other.do(ranks.digest) == digest_of(module)


def test_only_the_right_token_opens(two_ranks: Ranks, tmp_path: Path) -> None:
    rank, _ = two_ranks
    with weights.offer("auto", nn.Linear(3, 3)) as offered, open(tmp_path / "other", "wb") as other:
        file = offered.ticket.file
        other.truncate(file.size)  # the right size, not the right content
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        wrong = [
            dataclasses.replace(file, token=bytes(TOKEN_BYTES)[::-1] + b"x"),
            dataclasses.replace(file, token=os.urandom(TOKEN_BYTES)),
            dataclasses.replace(file, path=f"/proc/{os.getpid()}/fd/{other.fileno()}"),
            dataclasses.replace(file, size=file.size + 1),
            dataclasses.replace(file, path=str(pipe)),  # would wait for a writer
            dataclasses.replace(file, path="/dev/null"),
            dataclasses.replace(file, path=str(tmp_path)),
        ]
        assert rank.do(weights.can_open, offered.ticket)
        for bad in wrong:
            assert not rank.do(weights.can_open, dataclasses.replace(offered.ticket, file=bad))


def test_two_ranks_share_one_copy(two_ranks: Ranks) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(64 * MiB))  # 256 MiB
    before = [rank.do(ranks.memory_kib) for rank in two_ranks]
    with weights.offer("auto", module) as offered:
        ticket = offered.ticket
        for rank in two_ranks:
            rank.ask(ranks.load, ticket)  # reads every byte
        for rank in two_ranks:
            rank.answer()
    grown = sum(rank.do(ranks.memory_kib) for rank in two_ranks) - sum(before)
    assert 200 < grown / 1024 < 300  # two copies would be 512


def test_loading_again_and_again_keeps_no_files_open(two_ranks: Ranks) -> None:
    rank, _ = two_ranks
    with weights.offer("auto", nn.Linear(3, 3)) as offered:
        rank.do(ranks.load, offered.ticket)
        before = rank.do(ranks.open_files)
        for _ in range(5):
            rank.do(ranks.load, offered.ticket)
        assert rank.do(ranks.open_files) == before


# --- code that ranks do not have -----------------------------------------------------------------


@pytest.fixture
def private_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """A model whose module only this process can import."""
    (tmp_path / "private_models.py").write_text(
        "from torch import nn\nclass Model(nn.Linear):\n"
        "    @classmethod\n    def from_elsewhere(cls):\n        return cls(2, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import private_models

    yield private_models.Model(2, 2)
    del sys.modules["private_models"]


def test_a_missing_module_is_named_with_what_to_set(
    private_model: nn.Module, two_ranks: Ranks, tmp_path: Path
) -> None:
    rank, _ = two_ranks
    with weights.offer("auto", private_model) as offered:
        with pytest.raises(WeightsError, match="private_models") as caught:
            rank.do(ranks.load, offered.ticket)
        assert "PYTHONPATH" in str(caught.value)
        assert "register_pickle_by_value(private_models)" in str(caught.value)
        rank.do(ranks.add_path, str(tmp_path))  # what PYTHONPATH does
        try:
            assert rank.do(ranks.load, offered.ticket) == digest_of(private_model)
        finally:
            rank.do(ranks.remove_path, str(tmp_path))


def test_a_missing_module_of_a_loader_is_named_too(
    private_model: nn.Module, two_ranks: Ranks
) -> None:
    with (
        weights.offer(type(private_model).from_elsewhere, private_model) as offered,
        pytest.raises(WeightsError, match=r"cannot import .*private_models"),
    ):
        two_ranks[1].do(ranks.load, offered.ticket)


def test_code_registered_by_value_travels(private_model: nn.Module, two_ranks: Ranks) -> None:
    import cloudpickle

    code = sys.modules[type(private_model).__module__]
    cloudpickle.register_pickle_by_value(code)
    try:
        with weights.offer("auto", private_model) as offered:
            assert two_ranks[1].do(ranks.load, offered.ticket) == digest_of(private_model)
    finally:
        cloudpickle.unregister_pickle_by_value(code)


# --- drivers -------------------------------------------------------------------------------------


class Driver:
    """A script in a process of its own; it speaks by lines on its standard output."""

    def __init__(self, script: str, folder: Path, *arguments: str) -> None:
        path = folder / "driver.py"
        path.write_text(textwrap.dedent(script))
        self.process = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder / "tmp")},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_a_class_of_main_travels_by_value(two_ranks: Ranks, folder: Path) -> None:
    driver = Driver(
        """
        import pathlib, pickle, sys
        import torch
        from torch import nn
        from raymod import weights

        SCALE = 3

        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 2)

            def forward(self, x):
                return self.inner(x) * SCALE

        module = Own()
        offered = weights.offer("auto", module)
        x = torch.ones(1, 2)
        found = (offered.ticket, x, module(x).detach())
        pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(found))
        print("ready", flush=True)
        input()
        """,
        folder,
        str(folder / "ticket"),
    )
    try:
        assert driver.line() == "ready"
        ticket, x, wanted = pickle.loads((folder / "ticket").read_bytes())
        two_ranks[0].do(ranks.load, ticket)
        assert torch.equal(two_ranks[0].do(ranks.call, x), wanted)
    finally:
        driver.close()
    assert torch.equal(two_ranks[0].do(ranks.call, x), wanted)  # the driver is gone


@pytest.mark.parametrize("room", ["memory", "disk"])
def test_a_driver_killed_while_it_offers_leaves_nothing(room: str, folder: Path) -> None:
    driver = Driver(
        """
        import sys, time
        from torch import nn
        from raymod import weights
        from raymod.weights import files, limits

        if sys.argv[1] == "disk":
            limits.available_memory_bytes = lambda: 0
        write = files.SharedFile.write

        def write_and_wait(self, offset, data):
            write(self, offset, data)
            print("writing", flush=True)
            time.sleep(60)

        files.SharedFile.write = write_and_wait
        weights.offer("auto", nn.Linear(3000, 3000)).ticket
        """,
        folder,
        room,
    )
    try:
        assert driver.line() == "writing"
        links = [os.readlink(path) for path in Path(f"/proc/{driver.process.pid}/fd").iterdir()]
        assert any("raymod-weights" in link or str(folder) in link for link in links)
        driver.process.send_signal(signal.SIGKILL)
        driver.process.wait(10)
    finally:
        driver.close()
    assert list((folder / "tmp").iterdir()) == []
    assert [link for link in links if link.startswith("/dev/shm") and Path(link).exists()] == []


def test_offering_takes_no_memory_of_the_drivers_own(folder: Path) -> None:
    driver = Driver(
        """
        import time
        import torch
        from torch import nn
        from raymod import weights

        def kib(field):
            with open("/proc/self/status") as file:
                return next(int(l.split()[1]) for l in file if l.startswith(field))

        module = nn.ParameterDict({str(i): nn.Parameter(torch.ones(16 << 20)) for i in range(6)})
        module["strided"] = nn.Parameter(torch.ones(32 << 20)[::2])  # must be copied, by chunks
        before = kib("VmHWM:")
        with weights.offer("auto", module) as offered:
            offered.ticket
            print(kib("VmHWM:") - before, flush=True)
            before = kib("VmHWM:")
            total = sum(piece.nbytes for piece in offered.pieces(128 << 20))
            print(kib("VmHWM:") - before, total == offered.ticket.content_bytes, flush=True)
        """,
        folder,
    )
    try:
        assert int(driver.line()) < 100 << 10  # KiB, for 448 MiB of weights
        peak, complete = driver.line().split()
        assert complete == "True"
        assert int(peak) < 200 << 10
    finally:
        driver.close()
