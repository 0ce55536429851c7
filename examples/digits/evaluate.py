"""How good the demo pipeline's digits are, judged by a classifier fitted on the real ones.

python examples/digits/evaluate.py [--model DIR] [--sheet FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from digit_data import Floats, features, fit_classifier, real_pictures
from digit_prompts import HELD_OUT, NAMES
from numpy.typing import NDArray
from PIL import Image

PLAIN = "a handwritten {}"
WORDINGS = (
    "A Handwritten {}",
    "A HANDWRITTEN {}",
    "{}",
    "the digit {}.",
    "a picture of a handwritten {}",
    *HELD_OUT,
)
EACH = 10  # pictures a digit
NEEDED = 95  # of 100


def generate(
    pipe: FluxPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int = 8,
    true_cfg_scale: float = 1.0,
    max_sequence_length: int = 16,
) -> Floats:
    """Pictures for prompts, one seed each: (n, 32, 32), grey, 0 (black) to 1 (white)."""
    parts = []
    for start in range(0, len(prompts), 50):
        some = list(prompts[start : start + 50])
        images = pipe(
            some,
            negative_prompt=[""] * len(some) if true_cfg_scale > 1 else None,
            true_cfg_scale=true_cfg_scale,
            height=32,
            width=32,
            num_inference_steps=steps,
            max_sequence_length=max_sequence_length,
            generator=[torch.Generator().manual_seed(s) for s in seeds[start : start + 50]],
            output_type="np",
        ).images
        parts.append(images.mean(axis=3))
    return np.concatenate(parts)


def distances(first: Floats, second: Floats) -> Floats:
    """Euclidean distances between all rows of `first` and all rows of `second`."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2 * first @ second.T
    return np.sqrt(np.maximum(squares, 0))


def spread(points: Floats, labels: NDArray[np.int64]) -> float:
    """Mean distance between two different pictures of the same digit, over the digits."""
    means = []
    for digit in np.unique(labels):
        chosen = points[labels == digit]
        count = len(chosen)
        means.append(distances(chosen, chosen).sum() / (count * (count - 1)))
    return float(np.mean(means))


def nearest(points: Floats, others: Floats, *, same: bool) -> float:
    """Mean distance to the nearest of `others`; with `same`, a point is not its own neighbour."""
    table = distances(points, others)
    if same:
        np.fill_diagonal(table, np.inf)
    return float(table.min(axis=1).mean())


def contact_sheet(pictures: Floats, path: Path, columns: int, zoom: int = 2) -> None:
    """Write pictures as rows of a grid, enlarged, in the order given."""
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)), constant_values=0.8)
    count, height, width = padded.shape
    grid = padded.reshape(count // columns, columns, height, width).transpose(0, 2, 1, 3)
    image = Image.fromarray(
        np.rint(grid.reshape(-1, columns * width).clip(0, 1) * 255).astype(np.uint8)
    )
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.BICUBIC).save(path)


def evaluate(pipe: FluxPipeline, steps: int, sheet: Path) -> bool:
    """Print all figures, write the sheet, and say whether enough were recognised."""
    classifier = fit_classifier()
    real, real_labels = real_pictures()
    labels = np.repeat(np.arange(10), EACH)
    seeds = list(range(len(labels)))

    def texts(wording: str) -> list[str]:
        return [wording.format(NAMES[digit]) for digit in labels]

    def recognised(pictures: Floats) -> int:
        return int((classifier.predict(features(pictures)) == labels).sum())

    plain = generate(pipe, texts(PLAIN), seeds, steps=steps)
    count = recognised(plain)
    print(f"recognised, {PLAIN!r}, {steps} steps: {count} of {len(labels)} ({NEEDED} needed)")

    points, real_points = features(plain), features(real)
    ours, theirs = spread(points, labels), spread(real_points, real_labels)
    print(f"spread within a digit: {ours:.2f}, real digits {theirs:.2f}: {ours / theirs:.2f}")
    ours = nearest(points, real_points, same=False)
    theirs = nearest(real_points, real_points, same=True)
    print(f"distance to the nearest real digit: {ours:.2f}, between real digits {theirs:.2f}")
    between = distances(points, points) + np.diag(np.full(len(points), np.inf))
    print(f"closest two of the {len(labels)}: {between.min():.2f}")

    others = {wording: generate(pipe, texts(wording), seeds, steps=steps) for wording in WORDINGS}
    numerals = [PLAIN.format(digit) for digit in labels]
    others["a handwritten 7 (numerals)"] = generate(pipe, numerals, seeds, steps=steps)
    others["512 text tokens"] = generate(
        pipe, texts(PLAIN), seeds, steps=steps, max_sequence_length=512
    )
    others["true_cfg_scale=2"] = generate(
        pipe, texts(PLAIN), seeds, steps=steps, true_cfg_scale=2.0
    )
    others["4 steps"] = generate(pipe, texts(PLAIN), seeds, steps=4)
    others["28 steps"] = generate(pipe, texts(PLAIN), seeds, steps=28)
    for name, pictures in others.items():
        held = "  (wording not trained on)" if name in HELD_OUT else ""
        print(f"recognised, {name!r}: {recognised(pictures)} of {len(labels)}{held}")
    sheet.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(plain, sheet, EACH)
    print(f"wrote {sheet}: one digit a row")
    return count >= NEEDED


def main() -> None:
    """Read the command line; exit code 1 if too few digits are recognised."""
    shipped = Path(__file__).resolve().parents[2] / "raymod" / "demo" / "model"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=shipped, help="folder of the pipeline")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sheet", type=Path, default=Path("outputs/digits.png"))
    options = parser.parse_args()
    pipe = FluxPipeline.from_pretrained(options.model, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    sys.exit(0 if evaluate(pipe, options.steps, options.sheet) else 1)


if __name__ == "__main__":
    main()
