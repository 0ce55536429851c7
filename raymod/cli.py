"""The command line: `raymod demo`. The only place that prints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raymod import __version__
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
    return parser


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
