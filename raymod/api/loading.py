"""Modules that only the ranks load: the driver has a skeleton of them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from raymod import weights as weight_sources
from raymod.api.options import Options, check_module, check_prepare, options
from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.gang import Gang, HereGang, Tenant, Undecided
from raymod.module import RemoteModule, make_stub

__all__ = ["from_loader", "from_pretrained"]


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    cls: type[nn.Module] | None = None,
    torch_dtype: torch.dtype | None = None,
    workers: int | None = None,
    batch_degree: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    tp_degree: int | None = None,
    parallel: ParallelConfig | None = None,
    prepare: PrepareConfig | None = None,
    gang: GangConfig | None = None,
) -> RemoteModule:
    """Run a saved diffusers model on a gang of ranks, without loading it in this process.

    Each rank maps the checkpoint; here there is only a skeleton, with weights on the meta device.
    The stub goes where the model would: `FluxPipeline.from_pretrained(path, transformer=stub)`.
    The ranks' weights are those that the class's own `from_pretrained` loads.

    Args:
        path: Folder of the model, or of a pipeline; every node must have it under that path.
        subfolder: Where in that folder the model is: `"transformer"`.
        cls: The model's class. None: the one of diffusers that the config names.
        torch_dtype: As for diffusers: the dtype of all floating weights, but those that the class
            keeps in float32. None: the class's own, float32. If the checkpoint has another dtype,
            this process casts it once for all ranks of a node.
        workers: As for [`wrap`][raymod.api.wrap], like the rest.
        batch_degree: As in `ParallelConfig`.
        ulysses_degree: As in `ParallelConfig`.
        ring_degree: As in `ParallelConfig`.
        tp_degree: As in `ParallelConfig`.
        parallel: Number of ranks and degrees as one object; excludes the six above.
        prepare: What each rank does to its module before it serves.
        gang: Where and how the ranks run, and the limits of every wait.

    Returns:
        The stub. `raymod.unwrap(stub)` fetches the weights into a whole module.

    Raises:
        ConfigError: There is no such model, or something that was asked cannot be; raised before
            any rank exists.
        WeightsError: The checkpoint does not hold the model's weights.
        GangStartError: The ranks did not become ready; a rank that cannot read the checkpoint is
            named with its node.
    """
    asked = options(
        parallel,
        prepare,
        gang,
        workers=workers,
        batch_degree=batch_degree,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        tp_degree=tp_degree,
    )
    made = weight_sources.read_pretrained(
        path, subfolder=subfolder, cls=cls, torch_dtype=torch_dtype
    )
    degrees = asked.degrees(made.module)
    with made.offer as offer:
        check_prepare(made.module, asked.prepare)
        started = asked.start(offer, degrees, made.module)
        return _stub_of_skeleton(made.module, started, asked)


def from_loader(
    function: Callable[[], nn.Module],
    *,
    workers: int | None = None,
    batch_degree: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    tp_degree: int | None = None,
    parallel: ParallelConfig | None = None,
    prepare: PrepareConfig | None = None,
    gang: GangConfig | None = None,
) -> RemoteModule:
    """Run a module on a gang of ranks, each of which loads it by a function of yours.

    Nothing is loaded here: rank 0 describes the module, and the stub's local side is that
    skeleton, with weights on the meta device.

    Args:
        function: Without arguments, returns the module; the same on every rank. It is pickled, and
            must not take weights along.
        workers: As for [`wrap`][raymod.api.wrap], like the rest.
        batch_degree: As in `ParallelConfig`.
        ulysses_degree: As in `ParallelConfig`.
        ring_degree: As in `ParallelConfig`.
        tp_degree: As in `ParallelConfig`.
        parallel: Number of ranks and degrees as one object; excludes the six above.
        prepare: What each rank does to its module before it serves.
        gang: Where and how the ranks run, and the limits of every wait.

    Returns:
        The stub. `raymod.unwrap(stub)` fetches the weights into a whole module.

    Raises:
        ConfigError: Something that was asked cannot be.
        WeightsError: The function cannot be sent to the ranks.
        GangStartError: The ranks did not become ready, or the function failed on one; the cause is
            what it raised.
        PackError: The module cannot be described in this process.
    """
    asked = options(
        parallel,
        prepare,
        gang,
        workers=workers,
        batch_degree=batch_degree,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        tp_degree=tp_degree,
    )
    skeletons: list[nn.Module] = []

    def decide(packed: weight_sources.Skeleton) -> Degrees:
        skeleton = weight_sources.unpack_skeleton(packed)
        check_module(skeleton)
        check_prepare(skeleton, asked.prepare)
        skeletons.append(skeleton)
        return asked.degrees(skeleton)

    with weight_sources.offer_loader(function) as offer:
        started = asked.start(offer, Undecided(asked.world_size, decide))
    return _stub_of_skeleton(skeletons[0], started, asked)


def _stub_of_skeleton(
    skeleton: nn.Module, started: Gang | HereGang | Tenant, asked: Options
) -> RemoteModule:
    try:
        return make_stub(
            skeleton,
            started,
            device=torch.device("cpu"),
            freed=weight_sources.vacant(skeleton),
            from_local=False,
            cache=asked.prepare.cache,
            values=asked.values,
        )
    except BaseException:
        started.close()
        raise
