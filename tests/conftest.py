"""One Ray for all tests, and a look at the end at what they left behind."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Every process that a test starts inherits it, and so is known as ours.
MARK = "RAYMOD_TEST_SESSION"


def _set_up() -> str:
    """Set the environment for Ray, and make its folder.

    Before Ray is imported: it reads its authentication settings then, and would otherwise write a
    token into the home folder. The folder keeps these tests and other Rays from finding one
    another.
    """
    # Ray's sockets allow no long names, so this does not follow TMPDIR.
    folder = tempfile.mkdtemp(prefix="rmt-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(16),
        RAY_TMPDIR=folder,
        **{MARK: secrets.token_hex(8)},
    )
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)
    # Ranks find the tests' own modules, wherever pytest was called from.
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # A shell starts what it puts into the background with Ctrl-C ignored, and children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return folder


# A rank that imports a test's module comes by here too, and has all of it already.
_RAY_FOLDER = os.environ["RAY_TMPDIR"] if MARK in os.environ else _set_up()


class RayForTests:
    """The Ray that tests share: a user's own, as raymod sees it.

    Tests that need another one call `stop`; whoever needs this one then gets a fresh one.
    """

    def __init__(self) -> None:
        self._connection: str | None = None
        self._gangs: dict[str, Any] = {}

    def ensure(self) -> None:
        """Connected to the shared Ray."""
        import ray

        if self._connection is not None and self._is_live():
            return
        self.stop()
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=300 << 20,
        )
        self._connection = self._cluster()

    def gang(self, name: str, make: Callable[[], Any]) -> Any:
        """The gang of that name, made by `make` if there is none that works."""
        self.ensure()
        gang = self._gangs.get(name)
        if gang is None or gang.closed or not all(health.ok for health in _health(gang)):
            self._gangs[name] = gang = make()
        return gang

    def stop(self) -> None:
        """Connected to nothing; shared gangs and the shared Ray are gone."""
        ray = sys.modules.get("ray")
        if ray is None:
            return
        for gang in self._gangs.values():
            gang.close()
        self._gangs.clear()
        if ray.is_initialized():
            ray.shutdown()
        self._connection = None

    def leftovers(self) -> list[str]:
        """What gangs should have removed, while Ray still runs: placement groups, ranks."""
        ray = sys.modules.get("ray")
        for gang in self._gangs.values():
            gang.close()
        self._gangs.clear()
        if ray is None or self._connection is None or not self._is_live():
            return []
        table = ray.util.placement_group_table()
        groups = [f"placement group {k}" for k, v in table.items() if v["state"] != "REMOVED"]
        return groups + _processes(b"ray::RankActor", wait_s=5.0)

    def _is_live(self) -> bool:
        import ray

        return ray.is_initialized() and self._cluster() == self._connection

    def _cluster(self) -> str:
        import ray

        return str(ray._private.worker.global_worker.node.cluster_id.hex())


def _health(gang: Any) -> tuple[Any, ...]:
    from raymod.errors import RaymodError

    try:
        return tuple(gang.health())
    except RaymodError:
        return (type("Gone", (), {"ok": False}),)


@pytest.fixture(scope="session")
def ray_for_tests(no_leaks: None) -> Iterator[RayForTests]:
    """The shared Ray, not necessarily running."""
    shared = RayForTests()
    yield shared
    left = shared.leftovers()
    shared.stop()
    assert left == []


@pytest.fixture
def ray_session(ray_for_tests: RayForTests) -> RayForTests:
    """The shared Ray, running: 4 CPUs, no GPU, one node. Gangs attach to it."""
    ray_for_tests.ensure()
    return ray_for_tests


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails the session if a process, a shared-memory segment or a temp file is left."""
    before = _files()
    yield
    left = _processes(b"", wait_s=20.0)
    left += sorted(_files() - before)
    assert left == []


def _files() -> set[str]:
    """What of raymod's is in shared memory and in the folders for temp files."""
    found = {str(path) for path in Path(_RAY_FOLDER).glob("*raymod*")}
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        # the folder of a Ray here is another session's: this one's are in _RAY_FOLDER
        found |= {str(p) for p in folder.glob("*raymod*") if not p.name.startswith("raymod-ray-")}
    return found


def _processes(title: bytes, *, wait_s: float) -> list[str]:
    """Processes of this session, other than this one, that do not end by themselves in time."""
    deadline = time.monotonic() + wait_s
    while True:
        found = [f"process {pid}: {line}" for pid, line in _of_this_session(title)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _of_this_session(title: bytes) -> Iterator[tuple[int, str]]:
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            ours = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        pid = int(folder.name)
        if b"multiprocessing.resource_tracker" in line:  # Python's own; ends with this process
            continue
        if ours and pid != os.getpid() and line.startswith(title):
            yield pid, line.replace(b"\0", b" ").decode(errors="replace")[:100].strip()
