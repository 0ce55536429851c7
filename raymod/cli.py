"""The command line: `raymod demo`, `raymod bench`. The only place that prints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raymod import __version__
from raymod.bench import PARTS
from raymod.errors import RaymodError

if TYPE_CHECKING:
    from raymod.demo.run import DemoResult

__all__ = ["main"]

EXIT_OK, EXIT_DIFFERENT, EXIT_FAILED = 0, 1, 2

TOLERANCE = 1e-4
"""Largest difference of a pixel (0 to 1) for which the demo counts as equal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the console script `raymod`.

    Args:
        argv: Arguments without the program's name. None: those of the process.

    Returns:
        The exit code: 0, 1 where a comparison failed, 2 where the command itself did.
    """
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except RaymodError as error:
        print(f"raymod {options.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"raymod {options.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raymod", description="Run diffusion transformers split over a gang of Ray actors."
    )
    parser.add_argument("--version", action="version", version=f"raymod {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="make ten digits with and without raymod and compare them",
        description="Make ten handwritten digits with the pipeline that ships with raymod, wrap "
        "its transformer, make them again with the same seeds, and compare. Writes a picture of "
        "both.",
    )
    demo.add_argument("--workers", type=_positive, default=2, metavar="N", help="ranks (default 2)")
    demo.add_argument("--steps", type=_positive, default=8, metavar="N", help="steps (default 8)")
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("raymod-demo.png"),
        metavar="FILE",
        help="the picture (default raymod-demo.png)",
    )
    demo.add_argument("--json", action="store_true", help="print the result as JSON")
    demo.set_defaults(run=_demo)
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure what raymod costs, beside the alternatives",
        description="Measure calls, steps, start-up and memory beside cache-dit's Ray wrapper, "
        "plain torch.distributed, the local module and a memcpy, and say which figures are met "
        "(about 12 minutes). With --model, time a pipeline of yours with and without raymod. "
        "Writes FILE.json and FILE.png.",
    )
    bench.add_argument(
        "--only", type=_parts, default=PARTS, metavar="PARTS", help=f"some of {','.join(PARTS)}"
    )
    bench.add_argument(
        "--quick", action="store_true", help="small and few: whether it runs, not how fast"
    )
    bench.add_argument("--model", metavar="PATH", help="a diffusers pipeline to time instead")
    bench.add_argument("--workers", type=_positive, metavar="N", help="ranks, with --model")
    bench.add_argument("--steps", type=_positive, default=8, metavar="N", help="with --model")
    bench.add_argument("--prompt", metavar="TEXT", help="with --model")
    bench.add_argument(
        "--dtype", default="auto", metavar="NAME", help="with --model: bfloat16, ..."
    )
    bench.add_argument(
        "--arguments",
        type=json.loads,
        metavar="JSON",
        help="with --model: of the pipeline's call, such as '{\"height\": 512}'",
    )
    bench.add_argument(
        "--output",
        type=Path,
        default=Path("raymod-bench"),
        metavar="FILE",
        help="what is written, without its ending (default raymod-bench)",
    )
    bench.add_argument("--json", action="store_true", help="print the result as JSON")
    bench.set_defaults(run=_bench)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}"
        )
    return parts


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _demo(options: argparse.Namespace) -> int:
    from raymod.demo.run import run_demo

    result = run_demo(workers=options.workers, steps=options.steps, output=options.output)
    equal = result.max_difference <= TOLERANCE
    if options.json:
        print(json.dumps(dataclasses.asdict(result), indent=2, default=str))
    else:
        print(_demo_text(result, equal=equal))
    return EXIT_OK if equal else EXIT_DIFFERENT


def _bench(options: argparse.Namespace) -> int:
    from raymod.bench.picture import MISSING, draw
    from raymod.bench.run import check_folder, run_bench, write_json

    file, picture = (options.output.with_suffix(ending) for ending in (".json", ".png"))
    check_folder(file)
    if options.model:
        return _bench_model(options, file)
    found = run_bench(
        options.only,
        quick=options.quick,
        progress=lambda part: print(f"measuring {part} ...", file=sys.stderr, flush=True),
    )
    write_json(found, file)
    drawn = "calls" in found and draw(found["calls"], picture)
    if options.json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print(_bench_text(found))
        print(f"\nfigures: {file}")
        if "calls" in found:
            print(f"picture: {picture if drawn else MISSING}")
    missed = any(row["met"] is False for row in found["rows"])
    return EXIT_DIFFERENT if missed and not options.quick else EXIT_OK


def _bench_text(found: dict[str, Any]) -> str:
    table = _table(
        ("what", "measured", "figure", "", "made of"), [row["cells"] for row in found["rows"]]
    )
    machine = found["machine"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    head = f"{found['date']}, {machine['cores']} cores, {gpus}, torch {machine['torch']}"
    if found["quick"]:
        head += "; quick: sizes are small, so the figures say nothing"
    return f"{head}\n\n{table}"


def _bench_model(options: argparse.Namespace, file: Path) -> int:
    from raymod.bench.pipeline import PROMPT, bench_pipeline
    from raymod.bench.run import write_json

    found = bench_pipeline(
        options.model,
        workers=options.workers,
        steps=options.steps,
        prompt=options.prompt or PROMPT,
        arguments=options.arguments,
        dtype=options.dtype,
    )
    write_json(found, file)
    if options.json:
        print(json.dumps(found, indent=2, default=str))
        return EXIT_OK
    steps = _table(
        ("ms a step", "median", "quartiles"),
        [
            (way, f"{found[way]['median']:.1f}", " ".join(f"{q:.1f}" for q in quartiles))
            for way in ("local", "raymod")
            for quartiles in [found[way]["quartiles"]]
        ],
    )
    parts = _table(
        ("of a call", "median"),
        [
            (key, f"{value * 1000:.2f} ms" if key.endswith("_s") else f"{value / 1e6:.3f} MB")
            for key, value in found["parts"].items()
        ],
    )
    start = _table(
        ("start-up", "seconds"), [(name, f"{s:.2f}") for name, s in found["phases"].items()]
    )
    memory = ", ".join(f"{who} {mb:.0f} MB" for who, mb in found["memory_mb"].items())
    print(
        f"{found['split']}; {', '.join(found['devices'])}\n\n{steps}\n\n{parts}\n\n{start}\n\n"
        f"memory: {memory}\nlargest difference of the latents: {found['difference']:.1e}\n"
        f"figures: {file}"
    )
    return EXIT_OK


def _demo_text(result: DemoResult, *, equal: bool) -> str:
    ranks = _table(
        ("rank", "node", "device", "pid"),
        [(str(r.rank), r.node_address, str(r.device), str(r.pid)) for r in result.ranks],
    )
    phases = _table(
        ("start-up", "seconds"),
        [(name, f"{seconds:.2f}") for name, seconds in result.phases.items()],
    )
    steps = _table(
        ("ms a step", "first", "median"),
        [
            ("local", f"{result.local_first_ms:.1f}", f"{result.local_ms:.1f}"),
            ("raymod", f"{result.remote_first_ms:.1f}", f"{result.remote_ms:.1f}"),
        ],
    )
    verdict = "equal" if equal else f"DIFFERENT, more than {TOLERANCE:g}"
    return "\n\n".join(
        [
            f"placement ({result.split})\n{ranks}",
            phases,
            steps,
            f"largest difference over all pixels: {result.max_difference:.2e} ({verdict})\n"
            f"picture: {result.picture}",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


if __name__ == "__main__":
    sys.exit(main())
