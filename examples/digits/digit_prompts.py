"""The prompts the demo pipeline is trained on, and some that are kept back to test it."""

from __future__ import annotations

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_NOUNS = ("{}", "digit {}", "number {}", "figure {}", "numeral {}")
_FRAMES = (
    "{}",
    "a {}",
    "the {}",
    "a handwritten {}",
    "the handwritten {}",
    "handwritten {}",
    "a hand-written {}",
    "a picture of a {}",
    "a picture of the {}",
    "a picture of a handwritten {}",
    "a photo of the handwritten {}",
    "a drawing of the {}",
    "an image of a handwritten {}",
    "a {} written by hand",
    "the {}, handwritten",
    "the {} in black ink",
    "a black {} on white paper",
    "write a {}",
    "please write the {}",
    "draw a {}",
    "draw the {} by hand",
)

# Never shown in training: whole wordings that are only used by evaluate.py and the tests.
HELD_OUT = (
    "a photo of a {} in black ink",
    "please draw the handwritten digit {}",
    "an image of the number {} on white paper",
)

_CASES = (str, str.lower, str.upper, str.title, str.capitalize)
_ENDS = ("", ".")


def training_prompts(digit: int) -> list[str]:
    """All wordings of one digit, as a word and as a numeral, in several letter cases.

    Args:
        digit: 0 to 9.

    Returns:
        Sorted texts without repeats.
    """
    names = (NAMES[digit], str(digit))
    texts = {
        case(frame.format(noun.format(name))) + end
        for name in names
        for noun in _NOUNS
        for frame in _FRAMES
        for case in _CASES
        for end in _ENDS
    }
    held_out = {wording.format(name).lower() for name in names for wording in HELD_OUT}
    return sorted(text for text in texts if text.lower().rstrip(".") not in held_out)
