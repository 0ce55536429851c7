"""Plain processes that stand for ranks: they load tickets and answer questions about modules."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from raymod import weights
from raymod.calls import bytes_of

HELD: dict[str, Any] = {}


class Rank:
    """One process; `rank.do(function, ...)` runs a function of a module there."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def answer(self) -> Any:
        assert self._pipe.poll(60), "no answer within a minute"
        ok, value, trace = self._pipe.recv()
        if not ok:
            raise value from RuntimeError(trace)
        return value

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.ask(function, *args)
        return self.answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args), ""))
        except Exception as error:
            pipe.send((False, error, traceback.format_exc()))


# --- what ranks are asked ------------------------------------------------------------------------


def load(ticket: weights.Ticket, name: str = "module") -> dict[str, str]:
    HELD[name] = weights.load(ticket)
    return digest(name)


def digest(name: str = "module") -> dict[str, str]:
    return digest_of(HELD[name])


def edit(name: str = "module") -> None:
    """Change every tensor in place."""
    with torch.no_grad():
        for tensor in tensors_of(HELD[name]).values():
            tensor.fill_(1)


def drop() -> None:
    HELD.clear()


def start_receiving(ticket: weights.Ticket) -> None:
    HELD["receiver"] = weights.Receiver(ticket)


def receive(piece: weights.Piece) -> None:
    HELD["receiver"].receive_piece(piece)


def received() -> weights.Ticket:
    return HELD["receiver"].ticket


def stop_receiving() -> None:
    HELD.pop("receiver").close()


def add_path(folder: str) -> None:
    sys.path.insert(0, folder)


def remove_path(folder: str) -> None:
    sys.path.remove(folder)


def call(argument: torch.Tensor, name: str = "module") -> torch.Tensor:
    with torch.no_grad():
        return HELD[name](argument)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- helpers for both sides ----------------------------------------------------------------------


def memory_kib(field: str = "Pss") -> int:
    """One figure of this process's memory, in KiB."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{field}:"))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def digest_of(module: nn.Module) -> dict[str, str]:
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} "
        + hashlib.sha256(bytes_of(tensor.resolve_conj().contiguous()).numpy()).hexdigest()
        for name, tensor in tensors_of(module).items()
    }
