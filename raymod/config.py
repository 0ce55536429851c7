"""What a user can ask for: frozen, keyword-only, checked on creation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from raymod.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "RING_BACKENDS",
    "Degrees",
    "GangConfig",
    "ParallelConfig",
    "PrepareConfig",
    "check_ring_backend",
    "quantize_kind",
]

MAX_WORLD_SIZE = 4096

# diffusers' names of the attention backends that give the log-sum-exp which a ring needs.
RING_BACKENDS = (
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ways along each split; all set, product = world size.

    The mesh axes are in this order: batch outermost, then ring, and ulysses innermost.
    """

    batch_degree: int = 1
    ring_degree: int = 1
    ulysses_degree: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.batch_degree * self.sequence_degree

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that share a sequence."""
        return self.ring_degree * self.ulysses_degree

    def of(self, axis: str) -> int:
        """The degree along an axis of the mesh."""
        degree: int = getattr(self, f"{axis}_degree")
        return degree

    def __str__(self) -> str:
        factors = [(f.name, getattr(self, f.name)) for f in fields(self)]
        used = [f"{name}={degree}" for name, degree in factors if degree > 1]
        return " x ".join(used) or "no split"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is divided over the ranks.

    With `workers` alone raymod chooses the split: by sequence where the model has a plan, else by
    batch. With degrees alone the number of workers is their product. With both, they must agree.

    Attributes:
        workers: Number of ranks. 0: one in this process, without Ray, for debugging.
        batch_degree: Ways to divide the call's batch.
        ulysses_degree: Ways to divide the sequence, exchanging tokens for heads in attention
            (DeepSpeed-Ulysses, arXiv:2309.14509).
        ring_degree: Ways to divide the sequence, passing keys and values round in attention
            (arXiv:2310.01889). Holds less at once than Ulysses, and more at a time is sent; heads
            need not divide. Both multiply: Ulysses among neighbours, rings across them.
        tp_degree: Not available yet: anything but 1 is refused.
        verify: Compare the split model with the whole one on the first call of each kind. Costs
            one whole forward on every rank; a split that differs is never used.

    Raises:
        ConfigError: A degree is no positive integer, or the degrees do not multiply to `workers`.
        UnsupportedError: A split that this version does not have.
    """

    workers: int | None = None
    batch_degree: int | None = None
    ulysses_degree: int | None = None
    ring_degree: int | None = None
    tp_degree: int | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        if self.workers != 0 or isinstance(self.workers, bool):
            _check_count("workers", self.workers)
        for name in ("batch_degree", "ulysses_degree", "ring_degree", "tp_degree"):
            _check_count(name, getattr(self, name))
        _check_type("verify", self.verify, bool)
        if self.tp_degree not in (None, 1):
            raise UnsupportedError(
                f"tp_degree={self.tp_degree}: this version splits by batch and by sequence only. "
                f"Use batch_degree, ulysses_degree or ring_degree instead."
            )
        product = self._product()
        if self.workers == 0 and product > 1:
            raise ConfigError(
                f"workers=0 is one rank in this process, which divides nothing: {self._factors()}"
            )
        if self.workers and self.has_degrees and product != self.workers:
            raise ConfigError(
                f"the degrees do not multiply to the number of workers: {self._factors()} makes "
                f"{product}, but workers={self.workers}. Drop workers, or change a degree."
            )
        size = self.workers if self.workers is not None else product
        if size > MAX_WORLD_SIZE:
            raise ConfigError(f"{size} ranks asked for; the limit is {MAX_WORLD_SIZE}")

    @property
    def has_degrees(self) -> bool:
        """Whether any degree was given."""
        named = self.batch_degree is not None or self.ulysses_degree is not None
        return named or (self.ring_degree or 1) > 1

    @property
    def world_size(self) -> int | None:
        """Number of ranks, or None where nothing says it."""
        if self.workers == 0:
            return 1
        return self._product() if self.has_degrees else self.workers

    def degrees(self, *, sequence: bool, default_world_size: int) -> Degrees:
        """The degrees in full.

        Args:
            sequence: Whether the model can be split by sequence; decides where no degree is given.
            default_world_size: Number of ranks where none was asked for.
        """
        if self.workers == 0:
            return Degrees()
        if self.has_degrees:
            return Degrees(**self._given())
        size = self.workers or default_world_size
        return Degrees(ulysses_degree=size) if sequence else Degrees(batch_degree=size)

    def _given(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) or 1 for f in fields(Degrees)}

    def _product(self) -> int:
        return math.prod(self._given().values())

    def _factors(self) -> str:
        named = (f"{name}={degree}" for name, degree in self._given().items())
        shown = [one for one in named if not one.endswith("=1")]
        return " x ".join(shown) or "no degree above 1"


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What each rank does to its module before it serves, in the order of the attributes.

    Attributes:
        threads: Torch threads of a rank on CPU. None: the node's cores over its ranks.
        attention_backend: Name of a diffusers attention backend, as for
            `model.set_attention_backend`.
        quantize: A torchao config (`Int8WeightOnlyConfig()`) or diffusers' `TorchAoConfig`. The
            ranks' weights are quantized; the local ones are not.
        extra: `extra(module, rank_info) -> module`, run on each rank before the split; `rank_info`
            is a `RankInfo`. Must be picklable; must do the same on every rank.
        cache: A diffusers cache config, as for `model.enable_cache`; placed after the split. The
            value of a `current_timestep_callback` is taken here, and travels with each call.
        compile: Compile on each rank: True, or a mapping of options of `torch.compile`. A model
            with repeated blocks has these compiled, any other is compiled as one.
        compile_timeout_s: What a call may take longer while `compile` is on, in seconds.
        warm_up: Keyword arguments of a call that every rank makes at the end of the start, so
            that the first real call of this shape need not compile or check the split.

    Raises:
        ConfigError: An option of the wrong type.
        UnsupportedError: A quantization that cannot be done to a module that is loaded already.
    """

    threads: int | None = None
    attention_backend: str | None = None
    quantize: Any = None
    extra: Callable[[nn.Module, Any], nn.Module] | None = None
    cache: Any = None
    compile: bool | Mapping[str, Any] = False
    compile_timeout_s: float = 1800.0
    warm_up: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_count("threads", self.threads)
        if self.attention_backend is not None:
            _check_type("attention_backend", self.attention_backend, str)
        if self.quantize is not None:
            quantize_kind(self.quantize)
        if self.extra is not None and not callable(self.extra):
            raise ConfigError(
                f"extra must be a function of the module and the rank's info, not {self.extra!r}"
            )
        if not isinstance(self.compile, (bool, Mapping)):
            raise ConfigError(
                f"compile must be True, False or a mapping of options of torch.compile, not "
                f"{self.compile!r}"
            )
        _check_seconds("compile_timeout_s", self.compile_timeout_s)
        if self.warm_up is not None and not isinstance(self.warm_up, Mapping):
            raise ConfigError(
                f"warm_up must be a mapping of keyword arguments, not {type(self.warm_up).__name__}"
            )

    @property
    def extra_call_s(self) -> float:
        """What a call may take longer than without this, in seconds."""
        return self.compile_timeout_s if self.compiles else 0.0

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled; an empty mapping means that too."""
        return self.compile is not False


def check_ring_backend(ring_degree: int | None, backend: str | None) -> None:
    """Refuse an attention backend that cannot run in the ring that was asked for.

    Args:
        ring_degree: What was asked for.
        backend: Its name in diffusers; None: the usual one.

    Raises:
        UnsupportedError: It gives no log-sum-exp.
    """
    if (ring_degree or 1) > 1 and backend not in (None, *RING_BACKENDS):
        raise UnsupportedError(
            f"ring_degree={ring_degree} needs the log-sum-exp of attention, which raymod "
            f"takes from torch's own kernels: attention_backend={backend!r} is none of "
            f"{', '.join(RING_BACKENDS)}. Use one of these, or ulysses_degree, which runs with "
            f"every backend."
        )


def quantize_kind(config: Any) -> str:
    """What kind of quantization config this is: "torchao" or "diffusers" (its `TorchAoConfig`).

    Raises:
        ConfigError: None that is known.
        UnsupportedError: One that only works while a checkpoint is loaded.
    """
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(config).__mro__}
    if "torchao.AOBaseConfig" in names:
        return "torchao"
    if "diffusers.TorchAoConfig" in names:
        return "diffusers"
    name = type(config).__name__
    if "diffusers.QuantizationConfigMixin" in names:
        reason = _AT_LOADING.get(name, "it works only while a checkpoint is loaded")
        loader = "from_single_file" if name == "GGUFQuantizationConfig" else "from_pretrained"
        raise UnsupportedError(
            f"quantize={name}: {reason}. Let every rank load the model so: "
            f"weights=lambda: Model.{loader}(..., quantization_config={name}(...)). Or use "
            f"a torchao config, such as quantize=Int8WeightOnlyConfig()."
        )
    raise ConfigError(
        f"quantize must be a torchao config, such as torchao.quantization.Int8WeightOnlyConfig(), "
        f"or diffusers.TorchAoConfig, not {name}"
    )


_AT_LOADING = {
    "BitsAndBytesConfig": "bitsandbytes replaces the layers while a checkpoint is read, and on a "
    "GPU only",
    "GGUFQuantizationConfig": "GGUF is the format of a file, whose weights are quantized already",
    "QuantoConfig": "diffusers applies quanto while a checkpoint is read",
}


@dataclass(frozen=True, kw_only=True)
class GangConfig:
    """Where and how the ranks run.

    Attributes:
        start_timeout_s: Limit for the whole start, weights included, in seconds. Covers nodes
            that are still joining.
        call_timeout_s: Limit for one call, in seconds.
        close_timeout_s: Limit for a graceful close, in seconds; what is left then is killed.
        max_restarts: How many times a gang that has lost a rank is started anew by itself, with
            its weights and all that has changed since, and the call repeated.
        cpus_per_rank: Ray CPUs of a rank. None: one, or the fraction that fits the machine.
        gpus_per_rank: Ray GPUs of a rank, fractions allowed. None: one where the cluster has
            GPUs, else none.
        placement_strategy: Ray's strategy for the placement group that raymod makes.
        placement_group: A ready placement group to run in; raymod never removes it.
        bundle_indices: Its bundles to use, one a rank, in rank order. None: the first ones.
        runtime_env: Ray runtime environment of the ranks; works whether or not Ray runs already.
        env_vars: Environment variables of the ranks; win over anything forwarded.
        forward_env: Forward the driver's settings to the ranks (a documented set, by prefix).
        overwrite_env: Let forwarded values replace what a node already has.
        master_address: Address on which rank 0 serves the rendezvous. None: loopback where all
            ranks share a node, else Ray's address of rank 0's node.
        all_gpus_visible: Let each rank see all GPUs of its node and use its own by index.
        self_test: Try one collective at the start.
        transport: How calls travel. `"auto"`: through shared memory to ranks that share it with
            the driver, which is tried, and through Ray to the others. `"ray"`: through Ray to all.
            `"shared"`: refuse to start if a rank does not share memory with the driver.
        ray_init: Further arguments of `ray.init`, used only if raymod starts Ray.
        object_store_memory_bytes: Size of the object store, used only if raymod starts Ray.

    Raises:
        ConfigError: An option out of range, or two that exclude each other.
    """

    start_timeout_s: float = 600.0
    call_timeout_s: float = 1800.0
    close_timeout_s: float = 10.0
    max_restarts: int = 1
    cpus_per_rank: float | None = None
    gpus_per_rank: float | None = None
    placement_strategy: str = "PACK"
    placement_group: Any = None
    bundle_indices: tuple[int, ...] | None = None
    runtime_env: Mapping[str, Any] | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    forward_env: bool = True
    overwrite_env: bool = False
    master_address: str | None = None
    all_gpus_visible: bool = False
    self_test: bool = True
    transport: str = "auto"
    ray_init: Mapping[str, Any] = field(default_factory=dict)
    object_store_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "call_timeout_s", "close_timeout_s"):
            _check_seconds(name, getattr(self, name))
        if self.max_restarts != 0 or isinstance(self.max_restarts, bool):
            _check_count("max_restarts", self.max_restarts)
        for name in ("cpus_per_rank", "gpus_per_rank"):
            _check_amount(name, getattr(self, name))
        for name in ("forward_env", "overwrite_env", "all_gpus_visible", "self_test"):
            _check_type(name, getattr(self, name), bool)
        if self.placement_strategy not in _STRATEGIES:
            raise ConfigError(
                f"placement_strategy={self.placement_strategy!r} is none of Ray's: "
                f"{', '.join(_STRATEGIES)}"
            )
        if self.transport not in _TRANSPORTS:
            raise ConfigError(
                f"transport={self.transport!r} is none of {', '.join(map(repr, _TRANSPORTS))}"
            )
        if self.bundle_indices is not None:
            self._check_bundles()
        for name in ("runtime_env", "env_vars", "ray_init"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be a mapping, not {type(value).__name__}")
        pairs: Mapping[Any, Any] = self.env_vars
        for key, value in pairs.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                raise ConfigError(f"env_vars: {key!r} must be a string with a string value")
        _check_count("object_store_memory_bytes", self.object_store_memory_bytes)

    def _check_bundles(self) -> None:
        indices: tuple[Any, ...] = tuple(self.bundle_indices or ())
        if self.placement_group is None:
            raise ConfigError("bundle_indices needs a placement_group to point into")
        if len(set(indices)) != len(indices) or not all(
            isinstance(index, int) and index >= 0 for index in indices
        ):
            raise ConfigError(f"bundle_indices={indices!r} must be distinct, non-negative integers")


_TRANSPORTS = ("auto", "ray", "shared")
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer or None, not {value!r}")


def _check_amount(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number of at least 0 or None, not {value!r}")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number of seconds above 0, not {value!r}")


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {kind.__name__}, not {value!r}")
