"""Receivers in processes of their own, without Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from raymod.transport import SharedTransport


def _serve(line: Connection) -> None:
    transport = SharedTransport()
    kept: dict[str, Any] = {}  # what the functions of a test keep from one call to the next
    while True:
        try:
            work, args = cloudpickle.loads(line.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, work(transport, kept, *args)
        except Exception as error:
            answer = False, error
        line.send_bytes(cloudpickle.dumps(answer))
        del work, args, answer


class Peer:
    """A process with a transport of its own, that runs functions."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def begin(self, work: Callable[..., Any], *args: Any) -> None:
        """Have it run `work(transport, kept, *args)`."""
        self._line.send_bytes(cloudpickle.dumps((work, args)))

    def end(self) -> Any:
        """What came of it."""
        assert self._line.poll(60), "no answer from a peer"
        good, answer = cloudpickle.loads(self._line.recv_bytes())
        if not good:
            raise answer
        return answer

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        self.begin(work, *args)
        return self.end()

    def close(self) -> None:
        self._line.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
