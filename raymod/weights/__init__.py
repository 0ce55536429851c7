"""How the ranks get the module.

On the driver, `offer(source, module)` checks everything and gives an `Offer`; its `ticket` is
small, picklable, and goes to every rank, where `load(ticket)` returns the module:

    with offer("auto", module) as offered:
        ticket = offered.ticket                      # writes the shared copy
        ...                                          # on each rank:
        module = load(ticket)                        # maps it

Where `can_open(ticket)` is false on a rank (another node, another container), one rank of its
node takes the bytes in pieces, and the others use that one's ticket:

        receiver = Receiver(ticket)                  # on one rank of the node
        for piece in offered.pieces():               # on the driver, one in flight at a time
            receiver.receive_piece(piece)            # on that rank
        module = load(receiver.ticket)               # on every rank of the node
        receiver.close()                             # when all have loaded

`read_pretrained` makes a skeleton and an offer of a model that is only in a folder; a module that
only the ranks have is described by `pack_skeleton` there and `unpack_skeleton` here.

`free(module)` lets go of the driver's own weights, and `Freed.restore` puts them back; `vacant`
does the same for a skeleton, which never had any.
"""

from raymod.weights.files import CannotOpenError
from raymod.weights.loading import Receiver, can_open, load
from raymod.weights.local import Freed, free, vacant
from raymod.weights.offers import (
    LoaderTicket,
    MemoryTicket,
    Offer,
    Piece,
    Source,
    Ticket,
    offer,
    offer_loader,
)
from raymod.weights.pretrained import Pretrained, read_pretrained
from raymod.weights.skeleton import Skeleton, pack_skeleton, unpack_skeleton

__all__ = [
    "CannotOpenError",
    "Freed",
    "LoaderTicket",
    "MemoryTicket",
    "Offer",
    "Piece",
    "Pretrained",
    "Receiver",
    "Skeleton",
    "Source",
    "Ticket",
    "can_open",
    "free",
    "load",
    "offer",
    "offer_loader",
    "pack_skeleton",
    "read_pretrained",
    "unpack_skeleton",
    "vacant",
]
