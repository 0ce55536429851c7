"""Where the ranks go: what each needs, the placement group, and their order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raymod.config import GangConfig
from raymod.errors import CapacityError, ConfigError

__all__ = [
    "Bundles",
    "Spot",
    "Wanted",
    "cpu_share",
    "decide",
    "gpu_index",
    "in_rank_order",
    "remove",
    "reserve",
    "wait_until_ready",
]

logger = logging.getLogger(__name__)

# Of a CPU, per rank: the largest that fits. The least is what Ray can still tell from nothing.
_CPU_SHARES = (1.0, 0.5, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01)
# A gang leaves half of the free CPUs: to a second gang, and to the user's own tasks.
_CPU_PART = 0.5
_SLICE_S = 0.5
_QUIET_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of the cluster.

    Attributes:
        count: Number of ranks.
        cpus: Ray CPUs of each.
        gpus: Ray GPUs of each.
        strategy: Ray's placement strategy.
    """

    count: int
    cpus: float
    gpus: float
    strategy: str

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one rank, as Ray takes them; never empty."""
        bundle = {name: n for name, n in (("CPU", self.cpus), ("GPU", self.gpus)) if n}
        return bundle or {"CPU": _CPU_SHARES[-1]}

    def __str__(self) -> str:
        each = " + ".join(f"{n:g} {name}" for name, n in self.bundle.items())
        total = " and ".join(f"{n * self.count:g} {name}" for name, n in self.bundle.items())
        return f"{self.count} ranks want {total} ({each} each, {self.strategy})"


@dataclass(frozen=True, kw_only=True)
class Bundles:
    """A placement group and the bundles of it that the ranks use.

    Attributes:
        group: The placement group.
        indices: One bundle a rank.
        ordered: Whether the user gave the indices, which then are the rank order.
        owned: Whether raymod made the group, and so removes it.
    """

    group: PlacementGroup
    indices: tuple[int, ...]
    ordered: bool
    owned: bool


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where one actor came to be.

    Attributes:
        slot: Its place among the actors as they were created.
        node_id: Ray's id of the node.
        node_address: Ray's address of the node.
        gpu_ids: The GPUs that Ray reserved for it.
        pid: Its process.
        host: What tells apart sets of processes that see one another's ids.
    """

    slot: int
    node_id: str
    node_address: str
    gpu_ids: tuple[str, ...]
    pid: int
    host: str


def decide(config: GangConfig, count: int, *, deadline: float) -> Wanted:
    """What each rank needs, by the configuration and the cluster.

    Args:
        config: Explicit amounts win.
        count: Number of ranks.
        deadline: Until when, on the monotonic clock, to wait for a first node with resources.
    """
    if config.placement_group is not None:
        return _decide_in_bundles(config, count)
    nodes = _nodes()
    while not nodes and time.monotonic() < deadline:
        time.sleep(0.1)  # right after its start a node is not registered yet
        nodes = _nodes()
    gpus = config.gpus_per_rank
    if gpus is None:
        gpus = 1.0 if any(node.get("GPU", 0) for node in nodes) else 0.0
    cpus = config.cpus_per_rank
    if cpus is None:
        cpus = cpu_share(
            nodes,
            count,
            free=ray.available_resources().get("CPU", 0.0),
            gpus=gpus,
            strategy=config.placement_strategy,
        )
    return Wanted(count=count, cpus=cpus, gpus=gpus, strategy=config.placement_strategy)


def reserve(config: GangConfig, wanted: Wanted) -> Bundles:
    """The bundles for the ranks, not waited for. Owned ones must be removed, come what may."""
    if config.placement_group is not None:
        indices = config.bundle_indices
        return Bundles(
            group=config.placement_group,
            indices=indices if indices is not None else tuple(range(wanted.count)),
            ordered=indices is not None,
            owned=False,
        )
    group = placement_group([wanted.bundle] * wanted.count, strategy=wanted.strategy)
    return Bundles(group=group, indices=tuple(range(wanted.count)), ordered=False, owned=True)


def wait_until_ready(
    bundles: Bundles, wanted: Wanted, *, deadline: float, note: Callable[[Callable[[], str]], None]
) -> None:
    """Wait until all bundles have their place; nodes may still join meanwhile.

    Args:
        bundles: From `reserve`.
        wanted: For the messages.
        deadline: Limit, on the monotonic clock.
        note: Told now and then what is missing.

    Raises:
        CapacityError: The cluster does not have that much; says what is wanted and available.
    """
    began = time.monotonic()
    while True:
        left = deadline - time.monotonic()
        if bundles.group.wait(timeout_seconds=max(0.0, min(_SLICE_S, left))):
            return
        if left <= 0:
            break
        if time.monotonic() - began > _QUIET_S:
            note(lambda: f"{wanted}; {_available()}")
    what = "" if bundles.owned else "the given placement group did not become ready. "
    raise CapacityError(
        f"{what}{wanted}; {_available()}. Waited {time.monotonic() - began:.0f} s. Ask for fewer "
        f"workers, free devices or add nodes, take smaller GangConfig(cpus_per_rank, "
        f"gpus_per_rank), or give nodes that are still to join more time with "
        f"GangConfig(start_timeout_s)."
    )


def remove(bundles: Bundles) -> None:
    """Free the bundles, if raymod reserved them. Kill the actors in them first."""
    if bundles.owned and ray.is_initialized():
        with suppress(Exception):  # Ray may be on its way down; then so is the group
            remove_placement_group(bundles.group)


def in_rank_order(spots: Sequence[Spot], *, driver_node: str, ordered: bool) -> list[Spot]:
    """The actors in rank order.

    By node, the driver's own first, then by GPU number: neighbours in rank are neighbours in the
    machine, and rank 0, which sends the output, is near the driver if it can be.

    Args:
        spots: The actors, in any order.
        driver_node: Ray's id of the driver's node.
        ordered: Whether the slots are the user's own order, which then stays.
    """
    if ordered:
        return sorted(spots, key=lambda spot: spot.slot)
    return sorted(
        spots,
        key=lambda spot: (
            spot.node_id != driver_node,
            spot.node_id,
            [gpu_index(name) for name in spot.gpu_ids],
            spot.slot,
        ),
    )


def gpu_index(name: str) -> tuple[int, int, str]:
    """A sort key: GPU ids are numbers in strings ("10" after "9"), sometimes names."""
    return (0, int(name), "") if name.isdigit() else (1, 0, name)


def _decide_in_bundles(config: GangConfig, count: int) -> Wanted:
    group = config.placement_group
    if not isinstance(group, PlacementGroup):
        raise ConfigError(
            f"placement_group must be a Ray PlacementGroup, not a {type(group).__name__}"
        )
    specs = group.bundle_specs
    indices = config.bundle_indices if config.bundle_indices is not None else range(count)
    if len(indices) != count:
        raise ConfigError(f"{count} ranks, but {len(indices)} bundle_indices: {tuple(indices)}")
    missing = [index for index in indices if index >= len(specs)]
    if missing:
        raise ConfigError(
            f"the placement group has {len(specs)} bundles, and {count} ranks would use "
            f"{tuple(indices)}: there is no bundle {missing[0]}"
        )
    chosen = [specs[index] for index in indices]
    wanted = {}
    for name, asked in (("CPU", config.cpus_per_rank), ("GPU", config.gpus_per_rank)):
        least = min(float(spec.get(name, 0)) for spec in chosen)
        if asked is not None and asked > least:
            raise ConfigError(
                f"{asked:g} {name} a rank, but a bundle of the placement group has {least:g}"
            )
        wanted[name] = min(1.0, least) if asked is None else asked
    return Wanted(count=count, cpus=wanted["CPU"], gpus=wanted["GPU"], strategy="given group")


def _nodes() -> list[Mapping[str, float]]:
    """The resources of each live node that has any."""
    return [
        node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and any(node["Resources"].get(name) for name in ("CPU", "GPU"))
    ]


def cpu_share(
    nodes: Sequence[Mapping[str, float]], count: int, *, free: float, gpus: float, strategy: str
) -> float:
    """CPUs of a rank where nobody said: one, or the fraction that fits the cluster.

    Args:
        nodes: The resources of each node.
        count: Number of ranks.
        free: CPUs of the cluster that nobody has.
        gpus: GPUs of a rank.
        strategy: Ray's placement strategy.
    """
    total = sum(node.get("CPU", 0) for node in nodes)
    part = _CPU_PART * min(1.0, free / total) if total else 0.0
    reach = (lambda slots: max(slots, default=0)) if strategy == "STRICT_PACK" else sum
    for share in _CPU_SHARES:
        if reach([_slots(node, part, share, gpus) for node in nodes]) >= count:
            return share
    # too few GPUs, say: nodes are still to join, and nobody knows how many CPUs they have
    return _CPU_SHARES[-1]


def _slots(node: Mapping[str, float], part: float, share: float, gpus: float) -> int:
    """How many ranks fit on a node."""
    by_cpu = int(node.get("CPU", 0) * part / share + 1e-9)
    return min(by_cpu, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else by_cpu


def _available() -> str:
    total: dict[str, Any] = ray.cluster_resources()
    free = ray.available_resources()
    parts = [f"{free.get(n, 0):g} of {total.get(n, 0):g} {n}" for n in ("GPU", "CPU")]
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"the cluster has {' and '.join(parts)} free on {nodes} node{'s'[: nodes != 1]}"
