"""How a gang comes to be: all of it, or none."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymod.config import Degrees, GangConfig, ParallelConfig, PrepareConfig
from raymod.errors import GangStartError, RankDiedError, RankError, StartTimeoutError
from raymod.gang import placement, session
from raymod.gang.actor import by_value
from raymod.gang.cleanup import Cleanup
from raymod.gang.deliver import deliver
from raymod.gang.environment import forwarded, import_paths, runtime_env
from raymod.gang.lines import Lines
from raymod.gang.placement import Bundles, Spot
from raymod.gang.progress import Progress
from raymod.gang.ranks import Member, collect, host_id, judge, kill
from raymod.gang.session import LOOPBACK, Session
from raymod.transport import Transport
from raymod.weights import Offer, Ticket
from raymod.worker import RankInfo, versions

__all__ = ["Asked", "Existing", "Undecided", "default_world_size", "start"]

logger = logging.getLogger(__name__)

_DEFAULT_WORLD_SIZE = 2
_SELF_TEST_S = 60.0
# What takes long, for the progress line.
_DOING = {
    "place": "Ray starts the processes",
    "build": "the ranks import torch and the model's code",
    "load": "the ranks load the model",
    "receive_piece": "sending to other nodes",
}
# Beyond the limit of a call, so that the driver's is the one that strikes.
_COLLECTIVE_MARGIN_S = 60.0


@dataclass(frozen=True)
class Undecided:
    """Degrees that only the module can tell, of a module that only the ranks will have.

    Attributes:
        world_size: Number of ranks.
        decide: The degrees, from what rank 0's `skeleton` answers once it has loaded the module.
    """

    world_size: int
    decide: Callable[[Any], Degrees]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked of a gang.

    Attributes:
        config: Where and how the ranks run.
        degrees: How many ways along each split.
        parallel: What was asked of the split.
        prepare: What each rank does to its module.
        transport: How calls travel.
    """

    config: GangConfig
    degrees: Degrees | Undecided
    parallel: ParallelConfig
    prepare: PrepareConfig
    transport: Transport

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.degrees.world_size


@dataclass(frozen=True, kw_only=True)
class Existing:
    """What exists of a gang that is up.

    Attributes:
        session: The connection to Ray.
        bundles: Where Ray reserved resources for it.
        members: The ranks, in order.
        lines: How they are reached.
        infos: What each rank says of itself.
        split: What was split, in words.
        warnings: What the user should know.
        ranks: Ends the ranks and frees their bundles.
        cleanup: Ends all of it, Ray included where it is raymod's.
    """

    session: Session
    bundles: Bundles
    members: tuple[Member, ...]
    lines: Lines
    infos: tuple[RankInfo, ...]
    split: str
    warnings: tuple[str, ...]
    ranks: Cleanup
    cleanup: Cleanup


def default_world_size(config: GangConfig) -> int:
    """Number of ranks where nobody said: all GPUs there are, or 2 without any.

    Of the cluster, if there is a running one to attach to; else of this machine.
    """
    gpus = session.cluster_gpus(config)
    if gpus is None:
        gpus = torch.cuda.device_count()
    return int(gpus / (config.gpus_per_rank or 1.0)) or _DEFAULT_WORLD_SIZE


def start(asked: Asked, load: Offer, progress: Progress) -> Existing:
    """Bring a gang up.

    Args:
        asked: What is wanted.
        load: The weights' offer.
        progress: Told of the phases.

    Raises:
        GangStartError: It did not come up; then nothing of it is left.
    """
    cleanup = Cleanup()
    try:
        return _Start(asked, progress, cleanup).run(load)
    except BaseException:
        cleanup.run()
        raise


class _Start:
    """One start; a method a phase."""

    def __init__(self, asked: Asked, progress: Progress, cleanup: Cleanup) -> None:
        self.asked = asked
        self.config = asked.config
        self.progress = progress
        self.cleanup = cleanup
        self.ranks = Cleanup()
        self.deadline = time.monotonic() + asked.config.start_timeout_s

    def run(self, load: Offer) -> Existing:
        self.progress.enter("placing")
        self.session = session.attach(self.config)
        self.cleanup.add(session.release, self.session)
        self.cleanup.add(self.asked.transport.forget)
        self.cleanup.add(self.ranks.run)
        self.wanted = placement.decide(self.config, self.asked.world_size, deadline=self.deadline)
        bundles = self._place()
        self.progress.enter("starting")
        members = self._create(bundles)
        infos, ticket = self._build(members, load)
        self._meet(members)
        self.progress.enter("loading")
        deliver(load, ticket, members, self._ask)
        degrees = self.asked.degrees
        if isinstance(degrees, Undecided):
            degrees = degrees.decide(self._ask(members[:1], "skeleton")[0])
        self.progress.enter("splitting")
        reports = self._ask(
            members,
            "prepare",
            degrees=degrees,
            parallel=self.asked.parallel,
            config=self.asked.prepare,
        )
        lines = self._connect(members)
        self.progress.enter("ready")
        warnings = [*load.warnings, *(w for info in infos for w in info.warnings)]
        warnings += reports[0].warnings
        return Existing(
            session=self.session,
            bundles=bundles,
            members=members,
            lines=lines,
            infos=infos,
            split=reports[0].split,
            warnings=tuple(dict.fromkeys(warnings)),
            ranks=self.ranks,
            cleanup=self.cleanup,
        )

    # -- phases --------------------------------------------------------------------------------

    def _place(self) -> Bundles:
        bundles = placement.reserve(self.config, self.wanted)
        self.ranks.add(placement.remove, bundles)
        placement.wait_until_ready(
            bundles, self.wanted, deadline=self.deadline, note=self.progress.note
        )
        return bundles

    def _create(self, bundles: Bundles) -> tuple[Member, ...]:
        """One actor a bundle, and from where they are, the rank order."""
        # a health call must not queue behind a running forward
        options: dict[str, Any] = {"concurrency_groups": {"health": 1}}
        remote = ray.remote(**options)(by_value())
        created: list[Any] = []
        self.ranks.add(_kill_actors, created)
        for index in bundles.indices:
            created.append(remote.options(**self._options(bundles, index)).remote())
        environ = forwarded(self.config, os.environ)
        unplaced = [Member(slot, actor, _nowhere(slot)) for slot, actor in enumerate(created)]
        overwrite = self.config.overwrite_env
        paths = import_paths()
        asked = {m: m.actor.place.remote(environ, overwrite, paths) for m in unplaced}
        for actor in created:  # in line behind `place`: no rank waits for the others' answers
            actor.warm.remote()
        facts = self._wait(unplaced, asked, "place")
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        spots = [
            Spot(slot=slot, node_address=addresses.get(fact["node_id"], "unknown"), **fact)
            for slot, fact in enumerate(facts)
        ]
        ordered = placement.in_rank_order(
            spots, driver_node=self.session.node_id, ordered=bundles.ordered
        )
        members = tuple(Member(rank, created[spot.slot], spot) for rank, spot in enumerate(ordered))
        # from here on the processes are known, and are waited for
        self.ranks.add(_kill_members, members)
        return members

    def _options(self, bundles: Bundles, index: int) -> dict[str, Any]:
        wanted = self.wanted.bundle
        return {
            "num_cpus": wanted.get("CPU", 0),
            "num_gpus": wanted.get("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": runtime_env(self.config),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=bundles.group,
                placement_group_bundle_index=index,
                placement_group_capture_child_tasks=False,
            ),
        }

    def _build(self, members: Sequence[Member], load: Offer) -> tuple[tuple[RankInfo, ...], Ticket]:
        refs = {}
        for member in members:
            seat = {
                "rank": member.rank,
                "world_size": len(members),
                "node": member.spot.node_address,
                "node_id": member.spot.node_id,
                "gpu_ids": member.spot.gpu_ids,
                "transport": self.asked.transport,
            }
            # in bytes: the rank opens it when it can say what goes wrong
            refs[member] = member.actor.build.remote(cloudpickle.dumps(seat), load.imports)
        # most of this time the ranks import; meanwhile the weights are laid out for them
        ticket = load.ticket
        infos = []
        for member, answer in zip(members, self._wait(members, refs, "build"), strict=True):
            if "info" not in answer:
                raise _broken(member, answer)
            infos.append(answer["info"])
        _compare(infos, versions())
        return tuple(infos), ticket

    def _meet(self, members: Sequence[Member]) -> None:
        """Join the ranks and try a collective."""
        if len(members) == 1:
            return
        self.progress.enter("joining")
        try:
            self._join(members)
            if self.config.self_test:
                self._test(members)
        except GangStartError as error:
            gpus = any(member.spot.gpu_ids for member in members)
            error.args = (f"{error}\n\n{_advice(gpus)}",)
            raise

    def _join(self, members: Sequence[Member]) -> None:
        one_node = len({member.spot.node_id for member in members}) == 1
        first = members[0].spot.node_address
        address = self.config.master_address or (LOOPBACK if one_node else first)
        address, port = self._ask(members[:1], "bind", address)[0]
        refs = {
            member: member.actor.answer.remote(
                "join",
                address,
                port,
                own_address=LOOPBACK if one_node else member.spot.node_address,
                timeout_s=self._left(),
                limit_s=self.config.call_timeout_s + _COLLECTIVE_MARGIN_S,
            )
            for member in members
        }
        self._wait(members, refs, "join")

    def _test(self, members: Sequence[Member]) -> None:
        limit_s = min(_SELF_TEST_S, self._left())
        whole, self.deadline = self.deadline, time.monotonic() + limit_s
        self._ask(members, "self_test", limit_s)
        self.deadline = whole

    def _connect(self, members: Sequence[Member]) -> Lines:
        """The ways that calls take; afterwards ranks may be asked through these only."""
        lines = Lines(members, self.asked.transport)
        self.ranks.add(lines.close)
        if self.config.transport != "ray":
            reasons = lines.connect(deadline=self.deadline)
            if reasons and self.config.transport == "shared":
                rank, reason = min(reasons.items())
                raise GangStartError(
                    f"transport='shared', but {members[rank]} does not share memory with this "
                    f"process: {reason}. With transport='auto' such ranks are called through Ray."
                )
        return lines

    # -- asking --------------------------------------------------------------------------------

    def _left(self) -> float:
        return max(0.1, self.deadline - time.monotonic())

    def _ask(self, members: Sequence[Member], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        refs = {m: m.actor.answer.remote(method, *args, **kwargs) for m in members}
        return [reply.value for reply in self._wait(members, refs, method)]

    def _wait(
        self, members: Sequence[Member], refs: Mapping[Member, Any], method: str
    ) -> list[Any]:
        """The answers in rank order, or the error of the start."""
        phase = self.progress.phase
        outcome = collect(
            {ref: member for member, ref in refs.items()},
            deadline=self.deadline,
            look=lambda: self.progress.note(lambda: _DOING.get(method, method)),
        )
        error = judge(outcome, members)
        if error is not None:
            raise _not_started(phase, error)
        if outcome.silent:
            late = ", ".join(str(m) for m in members if m.rank in outcome.silent)
            raise StartTimeoutError(
                f"the gang was not ready in time: in the phase {phase!r}, {late} did not answer "
                f"({method}) within {outcome.waited_s:.0f} s. The limit of the whole start is "
                f"GangConfig(start_timeout_s={self.config.start_timeout_s:g})."
            )
        return [outcome.replies[member.rank] for member in members]


def _nowhere(slot: int) -> Spot:
    return Spot(slot=slot, node_id="", node_address="(not placed yet)", gpu_ids=(), pid=0, host="")


def _kill_actors(actors: Sequence[Any]) -> None:
    kill([Member(slot, actor, _nowhere(slot)) for slot, actor in enumerate(actors)], host="")


def _kill_members(members: Sequence[Member]) -> None:
    kill(members, host=host_id())


def _not_started(phase: str, error: RankError | RankDiedError) -> GangStartError:
    cause = error.__cause__ if isinstance(error, RankError) and error.__cause__ else error
    raised = GangStartError.by(
        f"the gang did not start, in the phase {phase!r}: {error}{_import_hint(cause)}", error
    )
    raised.__cause__ = cause
    return raised


def _broken(member: Member, answer: Mapping[str, Any]) -> GangStartError:
    """The error for a rank that could not be built, often for want of a package."""
    cause: Exception = RuntimeError(f"{answer['type_name']}: {answer['message']}")
    if answer["is_import"]:
        cause = ImportError(answer["message"], name=answer["module"])
    error = GangStartError.by(
        f"the gang did not start: {member} raised {answer['type_name']}: {answer['message']}"
        f"{_import_hint(cause)}\n\nTraceback on rank {member.rank}:\n{answer['traceback']}",
        cause,
    )
    error.__cause__ = cause
    return error


def _import_hint(error: BaseException) -> str:
    """What to do about a module that the ranks do not find."""
    found = re.search(r"No module named '([\w.]+)'", str(error))
    if found is None or "PYTHONPATH" in str(error):
        return ""
    name = found[1].partition(".")[0]
    here = getattr(sys.modules.get(name), "__file__", None)
    where = f" This process has it from {here}." if here else ""
    return (
        f"\n\nThe ranks cannot import {name!r}.{where} Install it on their nodes, or let them find "
        f"it: GangConfig(env_vars={{'PYTHONPATH': <its folder>}}) on one machine, "
        f"GangConfig(runtime_env={{'py_modules': [<its folder>]}}) on several."
    )


def _compare(infos: Sequence[RankInfo], own: Mapping[str, str]) -> None:
    """Refuse ranks that run other versions: what travels between them would not fit."""
    for info in infos:
        other = {
            name: (here, info.versions.get(name, "none"))
            for name, here in own.items()
            if _release(name, here) != _release(name, info.versions.get(name, "none"))
        }
        if other:
            found = "; ".join(
                f"{name} is {here} here and {there} there" for name, (here, there) in other.items()
            )
            raise GangStartError(
                f"rank {info.rank} on node {info.node_address} runs other versions than this "
                f"process: {found}. Install the same on all nodes."
            )


def _release(name: str, version: str) -> str:
    """What of a version must agree: of Python "3.11", of torch not the build ("+cpu")."""
    if name == "python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]


def _advice(gpus: bool) -> str:
    if gpus:
        return (
            "The ranks started, and could not reach one another. Where GPUs cannot reach one "
            "another directly, set NCCL_P2P_DISABLE=1; where containers have little shared memory, "
            "NCCL_SHM_DISABLE=1; with several network interfaces, NCCL_SOCKET_IFNAME; NCCL_DEBUG="
            "INFO says more. GangConfig(env_vars={...}) sets them, and GangConfig(self_test=False) "
            "skips this test."
        )
    return (
        "The ranks started, and could not reach one another. With several network interfaces, "
        "GangConfig(env_vars={'GLOO_SOCKET_IFNAME': ...}) names the one to use; GangConfig("
        "self_test=False) skips this test."
    )
