"""A rank that serves a driver on its node: it waits at a local socket for what to do next."""

from __future__ import annotations

from raymod.errors import RankFailure
from raymod.transport import CannotOpenError, SharedTransport
from raymod.transport.wire import LineTicket, Wire, WireClosedError, connect
from raymod.worker.core import Reply, Worker

__all__ = ["serve"]

_METHODS = ("answer", "forward", "run")


def serve(worker: Worker, ticket: LineTicket) -> str:
    """Do what the driver asks until it closes the line. Waiting takes no processor time.

    Meanwhile the worker's calls travel through shared memory.

    Args:
        worker: The rank.
        ticket: How the driver is reached.

    Returns:
        Why it came to an end.
    """
    transport = SharedTransport()
    try:
        probe = transport.receive(ticket.probe)
        wire = connect(ticket, transport)
    except (CannotOpenError, OSError) as error:
        return f"the driver's memory or socket cannot be opened: {error}"
    before, worker.transport = worker.transport, transport
    try:
        wire.send(worker.rank, transport.reply(probe))
        del probe
        while True:
            _serve_once(worker, wire)
            transport.settle()  # what the next request would have to wait for
    except WireClosedError:
        return "the driver closed the line"
    finally:
        worker.transport = before
        wire.close()
        transport.close()


def _serve_once(worker: Worker, wire: Wire) -> None:
    """One request. Nothing of it is held when this returns: its memory is used again."""
    message = wire.receive(wait=True)
    assert message is not None
    method, args, kwargs = wire.read(message)
    if method not in _METHODS:
        raise ValueError(f"a driver asked for {method!r}")
    reply: Reply = getattr(worker, method)(*args, **kwargs)
    del args, kwargs
    try:
        wire.send(message.number, reply)
    except WireClosedError:
        raise
    except Exception as error:  # an answer that does not pickle
        failure = RankFailure.of(error, rank=worker.rank, node=worker.node)
        wire.send(message.number, Reply(rank=worker.rank, failure=failure))
