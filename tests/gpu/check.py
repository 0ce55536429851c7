"""One GPU, one rank: whether what arrives is right, and what it costs.

    python -m tests.gpu.check                  # exit code 1 if anything is wrong
    python -m tests.gpu.check --device cpu     # without a GPU: only whether the script runs

What needs Ray or diffusers is skipped, with a word, where they are not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raymod.calls import Packed, pack, unpack
from raymod.transport import Parcel, SharedTransport, gpu
from tests.transport.conformance import digest, zoo
from tests.transport.peers import Peer

MB = 1_000_000
PAYLOADS = {
    "flux-1024": ((1, 4096, 64), (1, 512, 4096)),
    "wan-720p": ((1, 16, 21, 90, 160), (1, 512, 4096)),
}
LARGE_BYTES = 64 << 20


class Skip(Exception):
    """A check that cannot be made here."""


class Echo(nn.Module):
    """Gives its first input back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=30, help="calls a measurement")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: nothing to check")
        return 1
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    print(f"{name}, torch {torch.__version__}")
    checks: list[Callable[[torch.device, int], Iterator[str]]] = [
        pinning,
        every_kind,
        edits,
        transport_cost,
        gang_cost,
        model,
        offload,
    ]
    wrong = 0
    for check in checks:
        print(f"\n{check.__name__.replace('_', ' ')}", flush=True)
        try:
            for line in check(device, options.repeat):
                print(f"  {line}", flush=True)
        except Skip as reason:
            print(f"  skipped: {reason}")
        except Exception:
            wrong += 1
            print("  WRONG\n" + traceback.format_exc(), flush=True)
    print(f"\n{wrong} of {len(checks)} checks are wrong")
    return 1 if wrong else 0


# -- without Ray -------------------------------------------------------------------------------


def pinning(device: torch.device, repeat: int) -> Iterator[str]:
    """Shared memory is pinned, and copies to and from it are faster for it."""
    if device.type != "cuda":
        raise Skip("there is no GPU")
    tensor = torch.randint(0, 255, (LARGE_BYTES,), dtype=torch.uint8, device=device)
    rates = {}
    for wanted in (True, False):
        with peer() as (mine, rank), pinning_is(wanted, rank):
            parcel = mine.send(pack(tensor, as_it_is=True))  # the first makes and pins it
            if wanted:
                segment = mine._pool._segments[0]
                assert segment._pinned, "the driver's segment could not be pinned"
            down = ms(lambda mine=mine: mine.send(pack(tensor + 1, as_it_is=True)), repeat, device)
            up = rank.run(upload_ms, parcel, str(device), repeat)
        rates[wanted] = down, up
        word = "pinned" if wanted else "not pinned"
        sizes = [LARGE_BYTES / 1e6 / each for each in (down, up)]
        yield f"{word}: down {sizes[0]:.1f} GB/s, up {sizes[1]:.1f} GB/s"
    assert rates[True][0] < rates[False][0], "pinning makes the way down no faster"
    assert rates[True][1] < rates[False][1], "pinning makes the way up no faster"


def every_kind(device: torch.device, repeat: int) -> Iterator[str]:
    """Every kind of tensor arrives on the other side's GPU, and comes back, bit for bit."""
    tensors = [tensor.to(device) for tensor in zoo()]
    views = [tensors[14][::3], tensors[0][:, 1:, ::2], tensors[0].expand(2, 3, 5, 7)]
    large = [torch.randn(400, 300, device=device).t(), torch.randn(1 << 20, device=device)]
    tensors += [*views, *large]
    expected = digest(tensor.cpu() for tensor in tensors)
    with peer() as (mine, rank):
        for _ in range(3):
            parcel = rank.run(back, mine.send(pack(tensors, as_it_is=True)), str(device), expected)
            assert digest(unpack(mine.receive(parcel))) == expected
    yield f"{len(tensors)} tensors there and back, three times"


def edits(device: torch.device, repeat: int) -> Iterator[str]:
    """What changes on the GPU between two calls is never missed, nor taken too early."""
    tensor = torch.zeros(1 << 20, device=device)
    with peer() as (mine, rank):
        for number in range(20):
            for _ in range(50):  # a queue of work that the copy has to wait for
                tensor.add_(1)
            parcel = mine.send(pack(tensor, as_it_is=True))
            tensor.fill_(-1)  # the sender may, as soon as send has returned
            assert rank.run(extremes, parcel, str(device)) == (50.0, 50.0), number
            tensor.zero_()
    yield "20 calls, each edited before and after"


def transport_cost(device: torch.device, repeat: int) -> Iterator[str]:
    """There and back through shared memory alone."""
    for name, shapes in PAYLOADS.items():
        inputs = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
        with peer() as (mine, rank):

            def call(mine: Any = mine, rank: Peer = rank, inputs: Any = inputs) -> Any:
                parcel = rank.run(first_back, mine.send(pack(inputs, as_it_is=True)), str(device))
                return unpack(mine.receive(parcel)).to(device)

            assert torch.equal(call(), inputs[0])
            yield f"{name}: {ms(call, repeat, device):.2f} ms, with embeddings, pickled requests"


# -- on the other side -------------------------------------------------------------------------


def upload_ms(transport: SharedTransport, kept: Any, parcel: Parcel, where: str, n: int) -> float:
    device = torch.device(where)
    return ms(lambda: transport.receive(parcel, device=device), n, device)


def back(transport: SharedTransport, kept: Any, parcel: Parcel, where: str, expected: Any) -> Any:
    tensors = unpack(transport.receive(parcel, device=torch.device(where)))
    assert digest(tensor.cpu() for tensor in tensors) == expected
    assert {tensor.device.type for tensor in tensors} == {torch.device(where).type}
    return transport.reply(pack(tensors, what="output", as_it_is=True))


def first_back(transport: SharedTransport, kept: Any, parcel: Parcel, where: str) -> Parcel:
    first, *_ = unpack(transport.receive(parcel, device=torch.device(where)))
    return transport.reply(pack(first, what="output", as_it_is=True))


def extremes(transport: SharedTransport, kept: Any, parcel: Parcel, where: str) -> Any:
    packed: Packed = transport.receive(parcel, device=torch.device(where))
    (tensor,) = packed.tensors
    return float(tensor.min()), float(tensor.max())


def never_pinned(transport: SharedTransport, kept: Any, wanted: bool) -> None:
    if not wanted:
        gpu.pin = lambda memory: False


# -- with Ray ----------------------------------------------------------------------------------


def gang_cost(device: torch.device, repeat: int) -> Iterator[str]:
    """An echo module on one rank: the cost of a call, and where outputs come back to."""
    raymod = with_ray()
    with raymod.wrap(Echo(), workers=1) as stub:
        yield f"rank 0 on {stub.report.ranks[0].device}"
        for name, shapes in PAYLOADS.items():
            inputs = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
            with torch.no_grad():
                output = stub(*inputs)
                assert output.device == inputs[0].device, f"came back on {output.device}"
                assert torch.equal(output, inputs[0])
                cost = ms(lambda stub=stub, inputs=inputs: stub(*inputs), repeat, device)
            report = stub.last_call
            parts = ", ".join(
                f"{part} {getattr(report, f'{part}_s') * 1000:.2f}"
                for part in ("pack", "send", "compute", "reply")
            )
            yield f"{name}: {cost:.2f} ms ({parts})"


def model(device: torch.device, repeat: int) -> Iterator[str]:
    """A Flux-like transformer on one rank against the same on this process's GPU."""
    raymod = with_ray()
    if not installed("diffusers"):
        raise Skip("diffusers is not installed")
    from raymod.bench.model import inputs, small

    module = small()
    given = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in inputs(image=(16, 16), text=64).items()
    }
    with torch.no_grad():
        module.to(device)
        local = module(**given)[0]
        local_ms = ms(lambda: module(**given), repeat, device)
        module.to("cpu")
        with raymod.wrap(module, workers=1) as stub:
            remote = stub(**given)[0]
            remote_ms = ms(lambda: stub(**given), repeat, device)
    difference = float((local - remote).abs().max() / local.abs().max())
    assert remote.device == local.device
    assert difference < 1e-3, f"outputs differ by {difference:.1e}"
    yield f"local {local_ms:.2f} ms, raymod {remote_ms:.2f} ms, largest difference {difference:.1e}"


def offload(device: torch.device, repeat: int) -> Iterator[str]:
    """A pipeline with a stub, on the GPU and with its other parts offloaded."""
    raymod = with_ray()
    for package in ("diffusers", "transformers", "accelerate"):
        if not installed(package):
            raise Skip(f"{package} is not installed")
    from raymod.demo import load_pipeline

    def draw(pipe: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 4, "max_sequence_length": 16, "output_type": "np"}
        return pipe("a handwritten seven", generator=generator, **options).images[0]

    pipe: Any = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    before = draw(pipe)
    with raymod.wrap(pipe, workers=1):
        pipe.to(device)
        yield f"pipe.to({str(device)!r}): differs by {abs(draw(pipe) - before).max():.1e}"
        if device.type == "cuda":
            pipe.enable_model_cpu_offload()
            difference = abs(draw(pipe) - before).max()
            yield f"enable_model_cpu_offload: differs by {difference:.1e}"
            assert difference < 0.05, "the picture is another"
            pipe.remove_all_hooks()
        raymod.unwrap(pipe)


# -- what the checks share ---------------------------------------------------------------------


@contextmanager
def peer() -> Iterator[tuple[SharedTransport, Peer]]:
    """This process's transport, and another process with its own."""
    mine, other = SharedTransport(), Peer()
    try:
        yield mine, other
    finally:
        other.close()
        mine.close()


@contextmanager
def pinning_is(wanted: bool, rank: Peer) -> Iterator[None]:
    """Leave pinning as it is, or have it fail here and there."""
    before = gpu.pin
    never_pinned(SharedTransport(), None, wanted)
    rank.run(never_pinned, wanted)
    try:
        yield
    finally:
        gpu.pin = before


def ms(call: Callable[[], Any], repeat: int, device: torch.device) -> float:
    """Median milliseconds, with the work of the GPU done at each end."""
    times = []
    for _ in range(repeat + 2):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times[2:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_ray() -> Any:
    if not installed("ray"):
        raise Skip("ray is not installed")
    import raymod

    warnings.filterwarnings("ignore", module="raymod")
    return raymod


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    sys.exit(main())
