"""The rank's half: from a ticket to a module."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from raymod.errors import WeightsError
from raymod.weights.files import SharedFile
from raymod.weights.image import read_image
from raymod.weights.offers import LoaderTicket, MemoryTicket, Piece, Ticket

__all__ = ["Receiver", "can_open", "load"]


def can_open(ticket: Ticket) -> bool:
    """Whether `load` can use the ticket in this process.

    False where a file that it names is not to be had: on another node, in another container.
    Such a rank needs the pieces, or the ticket of a `Receiver` on its node.
    """
    if isinstance(ticket, LoaderTicket):
        return True
    return ticket.file.opens() and all(file.opens() for file in ticket.needs)


def load(ticket: Ticket) -> nn.Module:
    """The module, on the CPU.

    All ranks of a node share one copy, in memory or of the checkpoint's pages, until one of them
    writes to a page, which is then its own.

    Raises:
        CannotOpenError: Not in this process; see `can_open`.
        WeightsError: The module's code or its checkpoint is not to be had here, or the loader did
            not return a module.
    """
    if isinstance(ticket, LoaderTicket):
        return _call(ticket)
    data = ticket.file.map()
    return _module(_put_together(data), "what arrived")


class Receiver:
    """Takes the pieces of an offer on one rank, for all ranks of its node.

    Keep it until they have loaded, then close it.

    Args:
        ticket: The offer's ticket, which cannot be opened here.

    Raises:
        WeightsError: There is no room for the copy.
    """

    def __init__(self, ticket: MemoryTicket) -> None:
        self._wanted = ticket
        self._file = SharedFile(ticket.file.size)
        self._received: dict[int, int] = {}

    def receive_piece(self, piece: Piece) -> None:
        """Take one piece, in any order."""
        for offset, data in piece.chunks:
            self._file.write(offset, data)
            self._received[offset] = len(data)

    @property
    def ticket(self) -> MemoryTicket:
        """The ticket for this node, once all pieces are here.

        Raises:
            WeightsError: Some are missing.
        """
        received, wanted = sum(self._received.values()), self._wanted.content_bytes
        if received != wanted:
            raise WeightsError(f"only {received} of {wanted} bytes of the weights arrived")
        return MemoryTicket(self._file.ticket(self._wanted.file.token), wanted)

    def close(self) -> None:
        """Let go of the copy; modules loaded from it stay."""
        self._file.close()


def _call(ticket: LoaderTicket) -> nn.Module:
    try:
        function = pickle.loads(ticket.function)
    except (ImportError, AttributeError) as error:
        raise _not_importable(error) from error
    return _module(function(), "the function that loads the module")


def _put_together(data: torch.Tensor) -> Any:
    try:
        return read_image(data)
    except (ImportError, AttributeError) as error:
        raise _not_importable(error) from error


def _module(value: Any, what: str) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise WeightsError(f"{what} returned a {type(value).__name__}, not an nn.Module")
    return value


def _not_importable(error: ImportError | AttributeError) -> WeightsError:
    name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    module = name or "the module"
    return WeightsError(
        f"this rank cannot import what the module is made of: {error}. Put the folder of {module} "
        f"on the ranks' path, GangConfig(runtime_env={{'env_vars': {{'PYTHONPATH': '/its/folder'"
        f"}}}}), install it there, or send its code along: "
        f"cloudpickle.register_pickle_by_value({name or 'module'}) before raymod.wrap."
    )
