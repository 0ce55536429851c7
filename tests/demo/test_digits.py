"""The shipped pipeline writes what it is asked to, and not the same thing every time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from diffusers import FluxPipeline

from raymod.demo import model_path

DIGITS = np.arange(10)


@pytest.fixture(scope="module")
def classifier(evaluate: ModuleType) -> Any:
    return evaluate.fit_classifier()


@pytest.fixture(scope="module")
def twenty(pipe: Any, evaluate: ModuleType) -> Any:
    """Two of each digit, at 8 steps."""
    prompts = [evaluate.PLAIN.format(evaluate.NAMES[digit]) for digit in np.repeat(DIGITS, 2)]
    return evaluate.generate(pipe, prompts, list(range(20)))


def test_digits_are_recognised(evaluate: ModuleType, classifier: Any, twenty: Any) -> None:
    found = classifier.predict(evaluate.features(twenty))
    assert (found == np.repeat(DIGITS, 2)).sum() >= 18, found


def test_the_classifier_does_not_recognise_just_anything(
    evaluate: ModuleType, classifier: Any, twenty: Any
) -> None:
    # If blank paper or the wrong digit passed too, the test above would show nothing.
    found = classifier.predict(evaluate.features(twenty))
    assert (found == np.roll(np.repeat(DIGITS, 2), 2)).sum() <= 2
    blank = classifier.predict(evaluate.features(np.ones_like(twenty)))
    assert len(set(blank)) == 1


def test_digits_are_neither_blurred_nor_copies(evaluate: ModuleType, twenty: Any) -> None:
    real, labels = evaluate.real_pictures()
    points, real_points = evaluate.features(twenty), evaluate.features(real)
    ours = evaluate.spread(points, np.repeat(DIGITS, 2))
    theirs = evaluate.spread(real_points, labels)
    assert 0.7 < ours / theirs < 1.3
    between = evaluate.nearest(real_points, real_points, same=True)
    assert 0.6 < evaluate.nearest(points, real_points, same=False) / between < 1.5
    assert evaluate.distances(points, real_points).min() > 0.1 * between
    # Ink is dark, paper is white, and little lies between: a mean of many digits is mostly grey.
    grey = ((twenty > 0.25) & (twenty < 0.75)).mean()
    assert grey < 2 * ((real > 0.25) & (real < 0.75)).mean()


@pytest.mark.parametrize(
    "wording", ["A HANDWRITTEN {}", "{}", "The Digit {}.", "please draw the handwritten digit {}"]
)
def test_wordings_and_cases_give_the_digit_asked_for(
    pipe: Any, evaluate: ModuleType, classifier: Any, wording: str
) -> None:
    names = [name.upper() if wording.isupper() else name for name in evaluate.NAMES]
    pictures = evaluate.generate(pipe, [wording.format(name) for name in names], list(range(10)))
    found = classifier.predict(evaluate.features(pictures))
    assert (found == DIGITS).sum() >= 9, found


def test_a_numeral_and_the_default_text_length_will_do(
    pipe: Any, evaluate: ModuleType, classifier: Any
) -> None:
    prompts = [f"a handwritten {digit}" for digit in DIGITS]
    pictures = evaluate.generate(pipe, prompts, list(range(10)), max_sequence_length=512)
    found = classifier.predict(evaluate.features(pictures))
    assert (found == DIGITS).sum() >= 9, found


def test_load_pipeline_makes_small_pictures_by_default(pipe: Any) -> None:
    assert pipe("a handwritten seven", num_inference_steps=1).images[0].size == (32, 32)


def test_a_plainly_loaded_pipeline_makes_the_same_picture(pipe: Any) -> None:
    import torch

    plain = FluxPipeline.from_pretrained(model_path())
    plain.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "output_type": "np", "max_sequence_length": 16}
    expected = pipe("nine", generator=torch.Generator().manual_seed(0), **options).images
    found = plain(
        "nine", height=32, width=32, generator=torch.Generator().manual_seed(0), **options
    ).images
    assert np.abs(found - expected).max() <= 1e-6
