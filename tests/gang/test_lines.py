"""Ranks that are called through a local socket and shared memory; mixed gangs too."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from raymod.errors import (
    CallTimeoutError,
    ConfigError,
    GangStartError,
    RankDiedError,
    StubClosedError,
)
from raymod.gang import Gang
from raymod.gang.lines import Lines
from tests.conftest import RayForTests
from tests.gang.helpers import Probe, nap, pids, start, who

pytestmark = [
    pytest.mark.gang,
    # what is called here has no batch to divide
    pytest.mark.filterwarnings("ignore:batch_degree=2:UserWarning"),
]

X = torch.tensor(2.0)
CALLS = int(os.environ.get("RAYMOD_TEST_CALLS", "200"))
LATENTS = (1, 64, 1024)
EMBEDDINGS = (1, 512, 1024)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum that no bit leaves as it is, and no order of the terms."""
    return tensor.view(torch.int32).long().sum()


class Echo(nn.Module):
    """Gives its first input back, and does to all inputs what it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *others: torch.Tensor, mode: str = "") -> Any:
        if mode == "write":
            for tensor in (x, *others):
                tensor.add_(1)
        elif mode == "keep":
            before = [tensor.clone() for tensor in self.kept]
            self.kept = [x, *others]
            return before
        elif mode == "long":
            raise ValueError("much to say " * 50_000)
        elif mode == "sum":
            return [bits(tensor) for tensor in (x, *others)]
        elif mode == "own":
            return x * 1
        return x


@pytest.fixture
def echo(ray_for_tests: RayForTests) -> Gang:
    gang: Gang = ray_for_tests.gang("echo", lambda: start(Echo(), transport="shared"))
    return gang


def refuse_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the driver could not open the memory of rank 1, which is then called through Ray."""
    greet = Lines._greet

    def choosy(self: Lines, *args: Any) -> int:
        rank = greet(self, *args)
        return rank if rank != 1 else -1

    monkeypatch.setattr(Lines, "_greet", choosy)


@pytest.fixture
def mixed(ray_for_tests: RayForTests, monkeypatch: pytest.MonkeyPatch) -> Gang:
    refuse_rank_1(monkeypatch)
    gang: Gang = ray_for_tests.gang("mixed", lambda: start(transport="auto"))
    return gang


# -- which way ---------------------------------------------------------------------------------


def test_the_way_is_chosen_by_where_the_ranks_are(echo: Gang, mixed: Gang) -> None:
    assert echo.report.near == (0, 1)
    assert mixed.report.near == (0,)


def test_the_way_can_be_asked_for(
    ray_session: RayForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_rank_1(monkeypatch)
    with start(ranks=1, transport="ray") as gang:
        assert gang.report.near == ()
        assert gang.call_all(who) == [0]
    with pytest.raises(GangStartError, match=r"rank 1 on node \S+ does not share memory with this"):
        start(transport="shared")
    with pytest.raises(ConfigError, match="transport='ipc' is none of 'auto', 'ray', 'shared'"):
        start(transport="ipc")


def test_a_driver_without_such_memory_calls_through_ray(
    ray_session: RayForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        gang = start(Echo(), ranks=1)
    with gang:
        assert gang.report.near == ()
        x = torch.randn(100_000)
        assert torch.equal(gang.call((x,), {}), x)


# -- what arrives ------------------------------------------------------------------------------


def test_inputs_and_outputs_are_private(echo: Gang) -> None:
    x, other = torch.randn(LATENTS), torch.randn(EMBEDDINGS)
    kept = x.clone(), other.clone()
    for _ in range(3):  # each rank writes to its own inputs, again and again
        out = echo.call((x, other), {"mode": "write"})
        assert torch.equal(out, kept[0] + 1)
        out.zero_()
        assert torch.equal(x, kept[0])
        assert torch.equal(other, kept[1])


def test_outputs_that_are_kept_stay_as_they_are(echo: Gang) -> None:
    kept = [echo.call((torch.full(LATENTS, float(n)),), {}) for n in range(20)]
    echo.call((torch.full(LATENTS, -1.0),), {})
    assert [float(out.min()) for out in kept] == [float(n) for n in range(20)]
    assert [float(out.max()) for out in kept] == [float(n) for n in range(20)]


def test_a_module_may_keep_its_inputs(echo: Gang) -> None:
    """As step caches do."""
    echo.call((torch.zeros(LATENTS), torch.zeros(EMBEDDINGS)), {"mode": "keep"})
    for n in range(1, 8):
        inputs = torch.full(LATENTS, float(n)), torch.full(EMBEDDINGS, -float(n))
        before = echo.call(inputs, {"mode": "keep"})
        assert [float(t.min()) for t in before] == [n - 1, 1 - n]
        assert [float(t.max()) for t in before] == [n - 1, 1 - n]


def test_every_dtype_and_shape(echo: Gang) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool):
        for x in (
            torch.randn(300, 200).to(dtype),
            torch.randn(300, 200).to(dtype).t(),
            torch.randn(300, 1, 200).to(dtype).expand(-1, 2, -1)[::2],
            torch.zeros(300, 0, 200, dtype=dtype),
            torch.tensor(1.0).to(dtype),
        ):
            out = echo.call((x,), {})
            assert out.dtype == dtype
            assert torch.equal(out, x)


# -- what is not sent again --------------------------------------------------------------------


def sums(gang: Gang, *tensors: torch.Tensor) -> int:
    """Checks that the ranks have the tensors, and tells how many bytes were reused."""
    out = gang.call(tensors, {"mode": "sum"})
    assert out == [bits(tensor) for tensor in tensors]
    assert gang.last_call is not None
    return gang.last_call.reused_bytes


def test_what_has_not_changed_is_not_sent_again(echo: Gang) -> None:
    embeddings = torch.randn(EMBEDDINGS)
    sums(echo, torch.randn(LATENTS), embeddings)
    for edit in (
        lambda: None,
        lambda: embeddings.numpy().__setitem__((0, 300, 7), 9.0),
        lambda: embeddings.data.add_(1),
        lambda: embeddings[0, 5].zero_(),
        lambda: None,
    ):
        edit()
        reused = sums(echo, torch.randn(LATENTS), embeddings)
    assert reused == embeddings.nbytes
    assert sums(echo, torch.randn(LATENTS), embeddings.clone()) == embeddings.nbytes
    assert sums(echo, torch.randn(LATENTS), torch.randn(EMBEDDINGS)) == 0
    assert sums(echo, torch.randn(EMBEDDINGS), torch.randn(LATENTS)) == 0
    with torch.inference_mode():
        made_there = torch.randn(EMBEDDINGS)
        sums(echo, made_there)
        assert sums(echo, made_there) == made_there.nbytes
        made_there[0, 0, 0] = 77
        assert sums(echo, made_there) == 0


def test_what_a_rank_wrote_over_is_sent_unspoilt(echo: Gang) -> None:  # R59
    embeddings = torch.randn(EMBEDDINGS)
    for _ in range(3):
        echo.call((torch.randn(LATENTS), embeddings), {"mode": "write"})
        assert sums(echo, torch.randn(LATENTS), embeddings) >= 0


def test_the_last_call_says_where_time_and_bytes_went(echo: Gang) -> None:  # R60, R61
    x, other = torch.randn(LATENTS), torch.randn(EMBEDDINGS)
    echo.call((x, other), {})
    echo.call((torch.randn(LATENTS), other), {})
    told = echo.last_call
    assert told is not None
    assert told.reused_bytes == other.nbytes
    assert x.nbytes < told.sent_bytes < x.nbytes + 10_000
    assert x.nbytes < told.returned_bytes < x.nbytes + 10_000
    parts = (told.pack_s, told.send_s, told.compute_s, told.reply_s)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(told.total_s, rel=0.05, abs=1e-3)


# -- failures ----------------------------------------------------------------------------------


def test_an_error_with_much_to_say_arrives_whole(echo: Gang) -> None:
    with pytest.raises(ValueError, match="much to say") as caught:
        echo.call((X,), {"mode": "long"})
    assert str(caught.value).count("much to say") >= 50_000
    assert float(echo.call((X,), {})) == 2.0


def test_a_death_is_seen_although_the_connection_stays_open(ray_session: RayForTests) -> None:
    """A process that the rank has forked off may still hold its end."""

    def leave_a_child(worker: Any) -> None:
        if worker.rank == 1:
            if os.fork() == 0:
                time.sleep(8)
                os._exit(0)
            os._exit(3)
        time.sleep(60)

    with start(transport="shared") as gang:
        began = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 1 on node"):
            gang.call_all(leave_a_child)
        assert time.monotonic() - began < 6
        gone = pids(gang)[1]
    assert not os.path.exists(f"/proc/{gone}")


def test_a_rank_that_stops_in_the_middle_of_nothing(ray_session: RayForTests) -> None:
    """Not even reading its requests; many of them do not block the driver either."""
    with start(transport="shared", close_timeout_s=1) as gang:
        os.kill(pids(gang)[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(CallTimeoutError, match="no answer from rank 1"):
            gang.call_all(who, timeout_s=1.0)
        assert time.monotonic() - began < 5


def test_closing_while_several_threads_call(ray_session: RayForTests) -> None:
    gang = start(transport="shared", close_timeout_s=1)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            while True:
                gang.call((X,), {})
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    gang.close()
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in raised] == [StubClosedError] * 3


def test_nothing_is_left_of_a_gang(ray_session: RayForTests) -> None:
    def files() -> list[str]:
        names = []
        for number in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{number}"))
            except OSError:
                continue
        return sorted(name for name in names if "raymod-call" in name)

    before = files()
    gang = start(Echo(), ranks=1, transport="shared")
    out = gang.call((torch.full(LATENTS, 5.0),), {})
    assert len(files()) > len(before)
    gang.close()
    assert float(out.mean()) == 5.0  # what was received stays, and nothing else
    assert len(files()) == len(before) + 1
    del out
    assert files() == before


# -- mixed gangs -------------------------------------------------------------------------------


def check(gang: Gang) -> None:
    assert float(gang.call((X,), {})) == 24.0


def test_a_mixed_gang_works(mixed: Gang) -> None:
    for _ in range(5):
        check(mixed)
    assert mixed.call_all(who) == [0, 1]
    assert mixed.call_all(who, reply_rank=1) == [1]
    large = torch.arange(300_000)
    for reply in mixed.call_all(lambda worker, t: t + worker.rank, large):
        assert torch.equal(reply - reply[0], large)
    assert [health.ok for health in mixed.health()] == [True, True]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_mixed_gang_waits_for_both_kinds(mixed: Gang, slow: int) -> None:
    assert mixed.call_all(nap, 0.7, rank=slow) == [0, 1]


def test_what_all_ranks_of_a_mixed_gang_raise_leaves_it_as_it_is(mixed: Gang) -> None:
    with pytest.raises(LookupError):
        mixed.call((X, "raise"), {"rank": -1})
    check(mixed)


def test_a_mixed_gang_after_an_interrupt(mixed: Gang) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        mixed.call((X, "sleep"), {"rank": 1, "seconds": 2.0})
    assert time.monotonic() - began < 1.5
    timer.join()
    check(mixed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_mixed_gang_dies(
    ray_session: RayForTests, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    refuse_rank_1(monkeypatch)
    with start(Probe(), close_timeout_s=1) as gang:
        assert gang.report.near == (0,)
        began = time.monotonic()
        with pytest.raises(RankDiedError, match=f"rank {rank} on node"):
            gang.call((X, "exit"), {"rank": rank})
        assert time.monotonic() - began < 4


# -- for long ----------------------------------------------------------------------------------


def size_of_process(worker: Any = None) -> dict[str, int]:
    """Open files, and proportional memory."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        pss = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return {"files": len(os.listdir("/proc/self/fd")), "KiB": pss}


def test_many_calls_leave_nothing(echo: Gang) -> None:
    """`RAYMOD_TEST_CALLS=2000` for the long form."""

    def some_calls(count: int) -> None:
        embeddings = torch.randn(EMBEDDINGS)
        for n in range(count):
            if n % 50 == 0:
                embeddings = torch.randn(1, 400 + n % 3 * 50, 1024)
            mode = ("", "own", "write")[n % 3]
            echo.call((torch.randn(LATENTS), embeddings), {"mode": mode})

    some_calls(150)
    before = [size_of_process(), *echo.call_all(size_of_process)]
    some_calls(CALLS)
    after = [size_of_process(), *echo.call_all(size_of_process)]
    for one, other in zip(before, after, strict=True):
        assert other["files"] <= one["files"] + 4
        assert other["KiB"] <= one["KiB"] + 12 * 1024, (before, after)
