"""What a Ray of raymod's own leaves on the disk, removed also when the driver is killed.

A small process of its own waits for the driver's end: this file, run by its path, so that it
imports nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["MARK", "Watcher", "end_processes"]

# In the environment of what a Ray starts: some of its processes give themselves another title.
MARK = "RAYMOD_RAY_FOLDER"

_LOOK_S = 1.0
_GRACE_S = 5.0  # for Ray's own processes, which end by themselves
_STOP_S = 5.0


class Watcher:
    """Removes a folder once this process is gone, however it went, or `remove` is called.

    Args:
        folder: Where a Ray keeps its files; its processes have it in their command lines, or under
            `MARK` in their environment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [sys.executable, "-I", "-S", __file__, str(folder), str(os.getpid())]
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no more processes are to be had: then only `remove` removes
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is not for it
                bufsize=0,
            )

    def remove(self) -> None:
        """Remove the folder now; its Ray has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with suppress(OSError):  # a word, since a process that was forked off may keep it open
            process.stdin.write(b"!")
            process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_processes(folder: Path) -> bool:
    """Kill the processes that name a folder, as `Watcher` says; whether there were any."""
    found = _processes(folder)
    for pid in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _processes(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != os.getpid() and _names(process, bytes(folder)):
                found.append(int(process.name))
    return found


def _names(process: Path, folder: bytes) -> bool:
    if folder in (process / "cmdline").read_bytes():
        return True
    variable = MARK.encode() + b"=" + folder
    return variable in (process / "environ").read_bytes().split(b"\0")


def _wait_for_the_end(driver: int) -> None:
    """Return when the driver says so, or is gone."""
    while os.getppid() == driver:
        if select.select([0], [], [], _LOOK_S)[0]:
            return


def _main(folder: Path, driver: int) -> None:
    _wait_for_the_end(driver)
    if not folder.is_dir():
        return
    deadline = time.monotonic() + _GRACE_S
    while _processes(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    # one that was just being started has no name yet
    while end_processes(folder) and time.monotonic() < deadline + _GRACE_S:
        time.sleep(0.1)
    while folder.is_dir() and time.monotonic() < deadline + _GRACE_S:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
