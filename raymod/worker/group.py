"""The ranks' process group: who serves the rendezvous, joining, and whether all are in step."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raymod.worker.host import interface_of

__all__ = ["Steps", "join", "leave", "self_test", "serve", "steps"]

Steps = tuple[tuple[tuple[int, ...], int], ...]

_BACKLOG = 1024


def serve(address: str) -> tuple[TCPStore, int]:
    """A TCP store that this process owns, listening on `address` only.

    The socket is bound here and handed over, so the port is never free in between.

    Returns:
        The store and its port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(_BACKLOG)
        port = int(sock.getsockname()[1])
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=sock.fileno(),
            timeout=timedelta(seconds=60),
        )
    except BaseException:
        sock.close()
        raise
    sock.detach()  # the store's now
    return store, port


def join(
    *,
    store: TCPStore | None,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    device: torch.device,
    own_address: str,
    timeout_s: float,
    limit_s: float,
) -> None:
    """Join the group of all ranks.

    Args:
        store: The store, on the rank that serves it.
        address: Where it is served.
        port: Where it is served.
        rank: This rank.
        world_size: Number of ranks.
        device: Its device: gloo serves CPU tensors always, NCCL those of a GPU.
        own_address: The address to exchange CPU tensors on.
        timeout_s: Limit for joining, in seconds.
        limit_s: Limit for each later collective, in seconds.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # by itself gloo takes whatever the host's name resolves to
        interface = interface_of(own_address)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if store is None:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    store.set_timeout(timedelta(seconds=timeout_s))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )


def self_test(device: torch.device, limit_s: float) -> None:
    """One small sum over all ranks.

    Args:
        device: Where the summands are.
        limit_s: Limit in seconds.

    Raises:
        RuntimeError: The sum is wrong or was not there in time.
    """
    if not dist.is_initialized():
        torch.ones(1, device=device).sum().item()
        return
    count = dist.get_world_size()
    total = torch.full((1,), float(dist.get_rank() + 1), device=device)
    work: Any = dist.all_reduce(total, async_op=True)
    work.wait(timedelta(seconds=limit_s))
    if total.item() != count * (count + 1) / 2:
        raise RuntimeError(f"a sum over {count} ranks came out as {total.item()}")


def steps() -> Steps | None:
    """How many collectives each group of this rank has begun; None where torch doesn't say.

    Ranks whose counts agree are in step: their next collectives meet.
    """
    if not dist.is_initialized():
        return ()
    counts: list[tuple[tuple[int, ...], int]] = []
    try:
        for group in dist.distributed_c10d._world.pg_map:
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            if len(ranks) == 1:
                continue
            for device in group._device_types:  # a group of several backends has no own count
                backend: Any = group._get_backend(device)
                counts.append((ranks, int(backend._get_sequence_number_for_group())))
    except (AttributeError, RuntimeError):  # private names of torch
        return None
    return tuple(counts)


def leave() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
