"""Scripts that let raymod start Ray, or attach: what they leave, and what they say at their end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, RayForTests
from tests.gang.helpers import is_running, wait_for

pytestmark = pytest.mark.gang

MARK = "-- the end begins --"
PRELUDE = f"""
import json, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from tests.gang.helpers import *

X = torch.tensor(2.0)
facts = {{}}

def mark():
    print(json.dumps(facts), flush=True)
    print({MARK!r}, file=sys.stderr, flush=True)
"""


def run_script(
    code: str, *, changes: dict[str, str | None] | None = None, exit_code: int = 0
) -> tuple[dict[str, Any], str]:
    """What a script said: its facts, and what came on standard error after the mark."""
    env = dict(os.environ)
    for name, value in (changes or {}).items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    began = time.monotonic()
    script = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,  # a Ctrl-C to its whole group is its own
    )
    took = time.monotonic() - began
    assert script.returncode == exit_code, script.stderr
    before, mark, after = script.stderr.partition(MARK + "\n")
    assert mark, script.stderr
    facts: dict[str, Any] = json.loads(script.stdout)
    facts.update(before=before, took_s=took)
    return facts, after


def nothing_left(facts: dict[str, Any]) -> bool:
    numbers: list[int] = facts.get("pids", [])
    return not any(is_running(pid) for pid in numbers) and not _ray_folders()


def _ray_folders() -> list[str]:
    return [path.name for path in Path(os.environ["RAY_TMPDIR"]).glob("raymod-ray-*")]


def test_a_ray_that_raymod_starts() -> None:  # R25
    """It listens on loopback only, serves all gangs, and ends with the last one."""
    pytest.importorskip("psutil")
    facts, after = run_script(
        """
import psutil, ray
small = 80 << 20
first = start(ranks=1, object_store_memory_bytes=small)
second = start()
me = psutil.Process()
listening = [
    (process.name(), connection.laddr.ip)
    for process in [me, *me.children(recursive=True)]
    for connection in process.net_connections("inet")
    if connection.status == psutil.CONN_LISTEN
]
first.close()
facts.update(
    pids=pids(first) + pids(second),
    listening=listening,
    up=ray.is_initialized(),
    store=ray.cluster_resources()["object_store_memory"] / small,
    mode=oct(os.stat(second._asking.existing.session.folder).st_mode & 0o777),
    dashboard=ray._private.worker.global_worker.node.address_info["webui_url"],
    sums=second.call_all(lambda worker, big: float(big.sum()), torch.ones(30 << 20)),
    call=float(second.call((X,), {})),
)
mark()
"""
    )
    assert after == ""
    assert len(facts["listening"]) > 5
    addresses = {address.removeprefix("::ffff:") for _, address in facts["listening"]}
    assert addresses == {"127.0.0.1"}
    assert facts["up"]
    assert facts["store"] == pytest.approx(1)
    assert facts["mode"] == "0o700"
    assert not facts["dashboard"]
    assert facts["sums"] == [30 << 20] * 2  # larger than the store
    assert facts["call"] == 24
    assert wait_for(lambda: nothing_left(facts))


def test_the_end_after_a_start_that_failed() -> None:
    facts, after = run_script(
        """
import ray
from raymod.errors import GangStartError
def load():
    raise LookupError("no such model")
try:
    start(ranks=1, load=load)
except GangStartError as error:
    facts.update(error=str(error), up=ray.is_initialized())
mark()
"""
    )
    assert after == ""
    assert "no such model" in facts["error"]
    assert not facts["up"]
    assert wait_for(lambda: nothing_left(facts))


def test_the_end_after_the_user_shut_ray_down() -> None:
    facts, after = run_script(
        """
import ray
from raymod.errors import GangFailedError
gang = start(ranks=1)
facts.update(pids=pids(gang))
ray.shutdown()
began = time.monotonic()
try:
    gang.call((X,), {})
except GangFailedError as error:
    facts.update(error=str(error), took=time.monotonic() - began, up=ray.is_initialized())
mark()
"""
    )
    assert after == ""
    assert "Ray was shut down in this process" in facts["error"]
    assert facts["took"] < 2
    assert not facts["up"]
    assert wait_for(lambda: nothing_left(facts))


def test_the_end_after_ctrl_c_in_a_call_and_an_exception() -> None:
    """Ctrl-C as on a terminal, where the whole process group gets the signal."""
    facts, after = run_script(
        """
gang = start()
sent = []
def send():
    sent.append(time.monotonic())
    os.killpg(os.getpgrp(), signal.SIGINT)
threading.Timer(1.0, send).start()
try:
    gang.call((X, "sleep"), {"rank": 1})
except KeyboardInterrupt:
    facts.update(pids=pids(gang), took=time.monotonic() - sent[0])
    facts.update(alive=[is_running(pid) for pid in pids(gang)], at=time.time())
sys.excepthook = lambda *error: mark()
raise LookupError("the script's own")
""",
        exit_code=1,
    )
    assert after == ""
    assert facts["took"] < 1
    assert facts["alive"] == [True, True]  # Ray shields its processes from the terminal
    assert time.time() - facts["at"] < 8  # the sleeping rank is not waited for
    assert wait_for(lambda: nothing_left(facts))


def test_the_end_with_a_gang_that_works() -> None:
    facts, after = run_script(
        """
gang = start()
facts.update(pids=pids(gang), call=float(gang.call((X,), {})))
mark()
"""
    )
    assert after == ""
    assert facts["call"] == 24
    assert wait_for(lambda: nothing_left(facts))


KILLED = "RAYMOD_TEST_KILLED"


def _with_mark(mark: str) -> list[str]:
    """Processes that got `mark` from the killed script, by whatever way."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if f"{KILLED}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_the_driver_is_killed_in_a_call() -> None:
    """Nothing is left within 30 s: processes, what Ray wrote, or a folder."""
    mark, shared = secrets.token_hex(8), set(os.listdir("/dev/shm"))
    folders = set(_ray_folders())
    code = """
gang = start()
child = os.fork()  # it keeps what the driver had open
if child == 0:
    time.sleep(600)
    os._exit(0)
print(json.dumps({"pids": pids(gang), "child": child}), flush=True)
gang.call((X, "sleep"), {"rank": -1, "seconds": 300.0})
"""
    script = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code],
        cwd=ROOT,
        env={**os.environ, KILLED: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    with script.stdout as output:
        facts = json.loads(output.readline())
    time.sleep(1.5)
    assert all(is_running(pid) for pid in facts["pids"])
    assert len(_with_mark(mark)) > 4
    assert len(set(_ray_folders()) - folders) == 1
    script.kill()
    script.wait()
    try:
        gone = wait_for(
            lambda: (
                not any(is_running(pid) for pid in facts["pids"])
                and set(_ray_folders()) <= folders
                and len(_with_mark(mark)) == 1  # the child
            ),
            limit_s=30,
        )
        assert gone, (_ray_folders(), _with_mark(mark))
    finally:
        os.kill(facts["child"], signal.SIGKILL)
    assert wait_for(lambda: set(os.listdir("/dev/shm")) <= shared)


def test_a_process_that_was_forked_off_leaves_the_ranks_alone() -> None:
    """It may neither call nor close them, and ends at once, though Ray's threads are not in it."""
    facts, after = run_script(
        """
from raymod import StubClosedError
gang = start()
read, write = os.pipe()
child = os.fork()
if child == 0:
    try:
        gang.call((X,), {})
    except StubClosedError as error:
        os.write(write, str(error).encode())
    gang.close()
    sys.exit(0)  # runs the exit handlers
began = time.monotonic()
os.waitpid(child, 0)
facts = {
    "waited_s": time.monotonic() - began,
    "said": os.read(read, 1000).decode(),
    "call": float(gang.call((X,), {})),
    "pids": pids(gang),
}
mark()
gang.close()
"""
    )
    assert after == ""
    assert nothing_left(facts)
    assert facts["waited_s"] < 20
    assert "forked off the one that the ranks belong to" in facts["said"]
    assert facts["call"] == 24


def test_a_ray_that_was_started_anew_is_another_one(tmp_path: Path) -> None:
    """In the place of raymod's; both without a home folder that Ray could write a token to."""
    blocker = tmp_path / "file"
    blocker.touch()
    facts, after = run_script(
        """
import ray
from raymod.errors import GangFailedError
auth = lambda: {k: v for k, v in os.environ.items() if 'RAY_AUTH' in k}
before = auth()
gang = start(ranks=1)
facts.update(mode=os.environ["RAY_AUTH_MODE"], length=len(os.environ["RAY_AUTH_TOKEN"]))
facts.update(inside=gang.call_all(lambda worker: os.environ["RAY_AUTH_MODE"]))
gang.close()
facts.update(back=auth() == before)
gang = start(ranks=1)
facts.update(pids=pids(gang))
ray.shutdown()
ray.init(num_cpus=1, log_to_driver=False, logging_level="error", include_dashboard=False,
         _temp_dir=os.environ["RAY_TMPDIR"] + "/anew", object_store_memory=100 << 20)
facts.update(live=gang._asking.existing.session.is_live())
try:
    gang.call((X,), {})
except GangFailedError as error:
    facts.update(error=str(error))
gang.close()
facts.update(up=ray.is_initialized(), one=ray.get(ray.remote(lambda: 1).remote()))
ray.shutdown()
mark()
""",
        changes={
            "HOME": str(blocker / "home"),
            "RAY_AUTH_MODE": None,
            "RAY_AUTH_TOKEN": None,
        },
    )
    assert after == ""
    assert (facts["mode"], facts["length"], facts["inside"]) == ("token", 64, ["token"])
    assert facts["back"]
    assert not facts["live"]
    assert "Ray was shut down in this process" in facts["error"]
    assert (facts["up"], facts["one"]) == (True, 1)
    assert wait_for(lambda: nothing_left(facts))


@pytest.fixture
def address(ray_session: RayForTests) -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def test_attaching_to_a_running_ray(address: str) -> None:
    facts, after = run_script(
        """
import ray
from raymod.config import GangConfig
from raymod.gang import default_world_size
facts.update(size=default_world_size(GangConfig()))
gang = start(ranks=1)
facts.update(pids=pids(gang), owned=gang._asking.existing.session.owned)
facts.update(cpus=ray.cluster_resources()["CPU"])
mark()
""",
        changes={"RAY_ADDRESS": address},
    )
    assert after == ""
    assert (facts["size"], facts["owned"], facts["cpus"]) == (2, False, 4)
    assert wait_for(lambda: nothing_left(facts))
    import ray

    assert ray.cluster_resources()["CPU"] == 4


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None}, "RAY_AUTH_MODE is not set to 'token'"),
        ({"RAY_AUTH_TOKEN": "x" * 32}, "the token that this process has is not the cluster's"),
    ],
)
def test_a_token_that_is_missing_is_named(
    address: str, changes: dict[str, str | None], missing: str, tmp_path: Path
) -> None:
    facts, _ = run_script(
        """
from raymod.errors import GangStartError
try:
    start(ranks=1)
except GangStartError as error:
    facts.update(error=str(error), address=os.environ["RAY_ADDRESS"])
mark()
""",
        changes={"RAY_ADDRESS": address, "HOME": str(tmp_path), **changes},
    )
    assert f"the running Ray at {address} wants a token" in facts["error"]
    assert missing in facts["error"]
    for text in (facts["error"], facts["before"]):
        assert os.environ["RAY_AUTH_TOKEN"] not in text
        assert "x" * 32 not in text
    assert facts["took_s"] < 60
