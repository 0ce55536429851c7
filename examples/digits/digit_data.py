"""scikit-learn's handwritten digits as 32 x 32 pictures, and what is measured on pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.svm import SVC

SIZE = 32
_MARGIN = 3  # pixels of white paper on each side; the originals touch the edge
_SHARPNESS = 10.0  # slope of the ink curve: higher gives a harder edge

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Pose:
    """How one digit lies on the paper.

    Args:
        angle: Turn in degrees.
        scale: Size, 1 fills the paper up to the margin.
        shift: Offset (rows, columns) in pixels.
        ink: Grey value, 0 to 1, that becomes half black: lower gives a thicker pen.
    """

    angle: float = 0.0
    scale: float = 1.0
    shift: tuple[float, float] = (0.0, 0.0)
    ink: float = 0.55


def draw(image: NDArray[Any], pose: Pose = Pose()) -> Floats:
    """Draw an 8 x 8 original as a 32 x 32 picture, black ink on white paper.

    Args:
        image: Shape (8, 8), 0 (paper) to 1 (ink).
        pose: Where and how it is drawn.

    Returns:
        Shape (32, 32), 0 (black) to 1 (white).
    """
    centre = (SIZE - 1) / 2
    rows, columns = np.meshgrid(np.arange(SIZE) - centre, np.arange(SIZE) - centre, indexing="ij")
    rows, columns = rows - pose.shift[0], columns - pose.shift[1]
    angle = np.deg2rad(pose.angle)
    step = 8 / (SIZE - 2 * _MARGIN) / pose.scale
    padding = 3
    where = np.stack(
        [
            (np.cos(angle) * rows - np.sin(angle) * columns) * step + 3.5 + padding,
            (np.sin(angle) * rows + np.cos(angle) * columns) * step + 3.5 + padding,
        ]
    )
    grey = ndimage.map_coordinates(np.pad(image, padding), where, order=3).clip(0, 1)

    def curve(value: Any) -> Any:
        return 1 / (1 + np.exp(-_SHARPNESS * (value - pose.ink)))

    ink = (curve(grey) - curve(0.0)) / (curve(1.0) - curve(0.0))
    return (1 - ink).clip(0, 1).astype(np.float32)


def originals() -> tuple[Floats, NDArray[np.int64]]:
    """The 1,797 digits as published: images (n, 8, 8) from 0 to 1, and labels (n,)."""
    digits = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)


def real_pictures() -> tuple[Floats, NDArray[np.int64]]:
    """The 1,797 digits drawn without any change of pose: (n, 32, 32), and labels (n,)."""
    images, labels = originals()
    return np.stack([draw(image) for image in images]), labels


def varied_pictures(variants: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Every digit in several slightly different poses, for training.

    Args:
        variants: Pictures for each original; the first is the unchanged one.
        seed: Of the poses.

    Returns:
        Pictures (n * variants, 32, 32) and labels (n * variants,).
    """
    images, labels = originals()
    random = np.random.default_rng(seed)
    pictures = []
    for image in images:
        pictures.append(draw(image))
        for _ in range(variants - 1):
            pose = Pose(
                angle=random.uniform(-6, 6),
                scale=random.uniform(0.96, 1.03),
                shift=(random.uniform(-0.6, 0.6), random.uniform(-0.6, 0.6)),
                ink=random.uniform(0.51, 0.59),
            )
            pictures.append(draw(image, pose))
    return np.stack(pictures), np.repeat(labels, variants)


def features(pictures: Floats) -> Floats:
    """Pictures (n, 32, 32) averaged down to 16 x 16 and flattened: (n, 256)."""
    count = len(pictures)
    pooled = pictures.reshape(count, SIZE // 2, 2, SIZE // 2, 2).mean(axis=(2, 4))
    return pooled.reshape(count, -1).astype(np.float32)


def fit_classifier() -> SVC:
    """A support vector classifier fitted on the real digits only; call it on `features`."""
    pictures, labels = real_pictures()
    return SVC(C=10.0).fit(features(pictures), labels)
