"""The process that removes a Ray's folder when the driver no longer can: no Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from raymod.gang.leftovers import MARK, Watcher, end_processes
from tests.gang.helpers import is_running, wait_for


def test_removing_ends_the_watcher_although_a_fork_keeps_its_pipe(tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    watcher = Watcher(folder)
    assert watcher._process is not None
    pid = watcher._process.pid
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        began = time.monotonic()
        watcher.remove()
        watcher.remove()
        assert time.monotonic() - began < 4
        assert not folder.exists()
        assert not is_running(pid)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_only_what_names_the_folder_is_ended(tmp_path: Path) -> None:
    folder, other = tmp_path / "one", tmp_path / "other"
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine, others = (subprocess.Popen([*command, str(path)]) for path in (folder, other))
    try:
        assert wait_for(lambda: end_processes(folder))
        assert mine.wait(10) == -9
        assert others.poll() is None
        assert not end_processes(folder)
    finally:
        others.kill()
        others.wait()
        mine.kill()
        mine.wait()


def test_what_gave_itself_another_title_is_ended_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    folders = (tmp_path / "one", tmp_path / "one-more")
    mine, others = (
        subprocess.Popen(command, env={**os.environ, MARK: str(folder)}) for folder in folders
    )
    try:
        assert wait_for(lambda: end_processes(folders[0]))
        assert mine.wait(10) == -9
        assert others.poll() is None
    finally:
        others.kill()
        others.wait()
        mine.kill()
        mine.wait()
