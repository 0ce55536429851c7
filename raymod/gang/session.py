"""The driver's Ray: the user's, a running one, or one that raymod starts and stops."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from raymod.config import GangConfig
from raymod.errors import ConfigError, GangStartError, UnsupportedError
from raymod.gang import token
from raymod.gang.interrupts import interrupt_deferred
from raymod.gang.leftovers import MARK, Watcher, end_processes

__all__ = ["Session", "attach", "cluster_gpus", "release"]

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_MIB = 1 << 20
_STORE_BYTES = 1 << 30  # for what raymod moves: the arguments of a few calls
_STORE_MIN_BYTES = 80 * _MIB  # Ray takes no less than 75
_PORT_CHECK_S = 2.0


@dataclass(frozen=True)
class Session:
    """One connection of this process to a Ray.

    Attributes:
        connection: Its name; another `ray.init` makes another.
        node_id: Ray's id of the driver's node.
        address: The cluster's address.
        folder: Ray's files, where raymod started it; removed with it.
    """

    connection: str
    node_id: str
    address: str
    folder: Path | None = None

    @property
    def owned(self) -> bool:
        """Whether raymod started this Ray."""
        return self.folder is not None

    def is_live(self) -> bool:
        """Whether this process still has this very connection."""
        return bool(ray.is_initialized()) and _connection() == self.connection


@dataclass
class _Owned:
    session: Session
    watcher: Watcher
    put_back: Callable[[], None]
    gangs: int = 0


_lock = threading.RLock()
_owned: _Owned | None = None


def attach(config: GangConfig) -> Session:
    """The session for a new gang; pair each with one `release`.

    Args:
        config: What to pass to Ray should raymod have to start it.

    Raises:
        GangStartError: A running Ray does not let this process in, or none can be started.
    """
    global _owned
    with _lock:
        if _owned is not None and not _owned.session.is_live():
            _forget()
        if not ray.is_initialized():
            address = running_address()
            if address is None:
                _owned = _start(config)
            else:
                _join(address)
        _refuse_client()
        if _owned is not None:
            _owned.gangs += 1
            return _owned.session
        return _describe(None)


def release(session: Session) -> None:
    """Let go of a session; a Ray that raymod started ends with its last gang."""
    with _lock:
        if _owned is None or _owned.session != session:
            return
        _owned.gangs -= 1
        if _owned.gangs > 0:
            return
        if session.is_live():
            with interrupt_deferred():
                ray.shutdown()
        _forget()


def cluster_gpus(config: GangConfig) -> float | None:
    """GPUs of the cluster that a gang would run on; None if raymod would have to start one."""
    with _lock:
        if not ray.is_initialized():
            address = running_address()
            if address is None:
                return None
            _join(address)
        return float(ray.cluster_resources().get("GPU", 0))


def running_address() -> str | None:
    """Address of a running Ray to attach to, as `ray.init()` itself would find it."""
    from ray._private import services

    named = os.environ.get("RAY_ADDRESS", "")
    if named == "local":
        return None
    if named:
        return named
    address = services.find_bootstrap_address(None)
    if address and not _listens(address):
        logger.info("the Ray last started on this machine (%s) is gone", address)
        return None
    return address or None


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PORT_CHECK_S):
            return True
    except (OSError, ValueError):
        return False


def _join(address: str) -> None:
    if address.startswith("ray://"):
        raise UnsupportedError(
            f"{address} is a Ray Client address: the driver must run on a node of the cluster. "
            f"Start this script there, for example as a Ray job."
        )
    logger.info("attaching to the running Ray at %s", address)
    try:
        if "RAY_ADDRESS" in os.environ and (not token.has_mode() or "RAY_AUTH_TOKEN" in os.environ):
            _knock(address)
        # The address is Ray's to find. One in RAY_ADDRESS leaves token authentication as it is
        # set; for a cluster of this machine Ray takes the user's token by itself.
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        with suppress(Exception):
            ray.shutdown()
        raise GangStartError(_refusal(address, error)) from error


def _knock(address: str) -> None:
    """Raise at once what Ray would raise after 20 s of trying with a token that does not fit."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        GcsClient(address=address)
    except AuthenticationError:
        raise
    except Exception as error:  # Ray itself may still get through
        logger.debug("asking the Ray at %s: %s", address, error)


def _refusal(address: str, error: Exception) -> str:
    causes = [error, error.__cause__, error.__context__]
    text = " ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
    if "AuthToken" not in text and "AuthenticationError" not in text:
        return f"cannot attach to the running Ray at {address}: {error}"
    if not token.has_mode():
        missing = "RAY_AUTH_MODE is not set to 'token' here"
    elif not token.has_token():
        missing = (
            "RAY_AUTH_MODE=token is set, but there is no token: set RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH, or put the file ~/.ray/auth_token in place"
        )
    else:
        missing = (
            "the token that this process has is not the cluster's: look at RAY_AUTH_TOKEN, "
            "RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token"
        )
    return f"the running Ray at {address} wants a token, and {missing}"


def _start(config: GangConfig) -> _Owned:
    given = _checked(config.ray_init)
    put_back = token.lend()
    # Private to the user, and gone with this Ray; sockets in it allow no long names.
    folder = Path(tempfile.mkdtemp(prefix="raymod-ray-", dir=_short_folder()))
    watcher = Watcher(folder)
    options: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "object_store_memory": config.object_store_memory_bytes or _store_bytes(),
        "_node_ip_address": LOOPBACK,
        "_temp_dir": str(folder / "ray"),
        **given,
    }
    logger.info("starting a local Ray")
    try:
        loopback = _loopback(options["_node_ip_address"] == LOOPBACK)
        with loopback, _in_environment(MARK, str(folder)), interrupt_deferred():
            _init(options, folder)
        return _Owned(_describe(folder), watcher, put_back)
    except BaseException as error:
        with suppress(Exception):
            ray.shutdown()
        end_processes(folder)
        watcher.remove()
        put_back()
        if isinstance(error, Exception):
            raise GangStartError(f"cannot start a local Ray: {error}") from error
        raise


def _init(options: Mapping[str, Any], folder: Path) -> None:
    for last in (False, True):
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:
            # Ray gives its own processes 30 s, which a busy machine may exceed
            if last or "timed out" not in str(error):
                raise
            logger.info("starting a local Ray took too long, trying once more: %s", error)
            with suppress(Exception):
                ray.shutdown()
            end_processes(folder)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    if "address" in given:
        raise ConfigError(
            "ray_init is for a Ray that raymod starts; to use a running one, set RAY_ADDRESS or "
            "call ray.init(address=...) before"
        )
    return dict(given)


def _short_folder() -> str:
    for folder in (os.environ.get("RAY_TMPDIR"), os.environ.get("TMPDIR"), "/tmp"):
        if folder and len(folder) <= 24 and os.access(folder, os.W_OK):
            return folder
    return tempfile.gettempdir()


def _store_bytes() -> int:
    """Modest, and no more than half of what shared memory has left."""
    try:
        left = shutil.disk_usage("/dev/shm").free
    except OSError:
        return _STORE_BYTES
    return max(_STORE_MIN_BYTES, min(_STORE_BYTES, left // 2))


@contextmanager
def _loopback(wanted: bool) -> Iterator[None]:
    """Let Ray take 127.0.0.1 as the node's address: then its servers listen there only.

    Ray replaces a loopback address by the machine's own, except on systems where it runs no
    clusters. For the time of its start, and in the processes it starts, this is such a system.
    """
    if not wanted:
        yield
        return
    before = ray_constants.ENABLE_RAY_CLUSTER
    with _in_environment(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0"):
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _in_environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for the processes that are started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _refuse_client() -> None:
    if ray.util.client.ray.is_connected():
        raise UnsupportedError(
            "this process is connected through Ray Client; the driver must run on a node of the "
            "cluster. Start this script there, for example as a Ray job."
        )


def _describe(folder: Path | None) -> Session:
    context = ray.get_runtime_context()
    return Session(
        connection=_connection(),
        node_id=context.get_node_id(),
        address=context.gcs_address,
        folder=folder,
    )


def _connection() -> str:
    """The cluster's id and this connection's: the latter begins anew in each cluster."""
    node: Any = ray._private.worker.global_worker.node
    return f"{node.cluster_id.hex()}:{ray.get_runtime_context().get_worker_id()}"


def _forget() -> None:
    global _owned
    if _owned is not None:
        _owned.watcher.remove()
        if not ray.is_initialized():  # one that the user started meanwhile has taken the token on
            _owned.put_back()
    _owned = None
