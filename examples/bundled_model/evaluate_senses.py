"""Ask the finished model about new drawings and strange voices, and count right answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from examples.bundled_model.evaluate import Score, report
from examples.bundled_model.media import BUNDLED, MARK, PROJECTOR
from examples.bundled_model.senses import Media, Senses
from examples.bundled_model.sound import questions as sound_questions
from examples.bundled_model.sound.recordings import say
from examples.bundled_model.sound.speech import Clip, load
from examples.bundled_model.vision import fonts, questions as vision_questions
from examples.bundled_model.vision.drawings import draw_print
from examples.bundled_model.vision.paint import NAMES, new_picture, picture_of

Question = tuple[str, str, Media, str]
#: The height of a printed digit, as shares of the picture's.
SIZES = {"small": (0.22, 0.4), "large": (0.4, 0.95)}
INKS = {"black on light": ("black",), "white on dark": ("white",), "in colors": NAMES}


def about_pictures(rng: Random) -> Iterator[Question]:
    """Yield (kind, question, picture, answer) without end."""
    while True:
        shown, pixels = new_picture(rng)
        for kind in vision_questions.kinds(shown):
            asked = rng.choice(vision_questions.ASK[kind])
            placed = MARK + asked if rng.random() < 0.5 else asked + MARK
            thing = "digit" if shown.shape is None else "shapes"
            name = f"{kind}, {thing}" if kind in ("color", "describe") else kind
            yield name, placed, pixels, vision_questions.answer(kind, shown)


def about_prints(rng: Random, printed: Sequence[fonts.Digits]) -> Iterator[Question]:
    """Yield (kind, question, picture, answer) about printed digits, without end."""
    while True:
        for size, share in SIZES.items():
            for ink, colors in INKS.items():
                drawn = draw_print(rng, printed, share, large=True)
                shown, pixels = picture_of(rng, drawn, rng.choice(colors))
                asked = MARK + rng.choice(vision_questions.ASK["digit"])
                answer = vision_questions.answer("digit", shown)
                yield f"a printed digit, {size}, {ink}", asked, pixels, answer


def about_recordings(rng: Random, voices: list[list[Clip]]) -> Iterator[Question]:
    """Yield (kind, question, recording, answer) without end."""
    while True:
        digits, samples = say(rng, rng.choice(voices), 5)
        question, answer = sound_questions.conversation(rng, digits)[0]
        yield f"{len(digits)} spoken digits", question, samples, answer


def evaluate(
    ask: Callable[[str, Media], str],
    questions: Iterator[Question],
    kinds: int,
    each: int,
    show: bool,
) -> None:
    """Ask `each` questions of each kind and print rows of the table."""
    scores: dict[str, Score] = {}
    for name, question, media, wanted in questions:
        score = scores.setdefault(name, Score())
        if score.asked < each:
            got = ask(question, media)
            score.asked, score.right = score.asked + 1, score.right + (got == wanted)
            if show and got != wanted:
                print(f"  {question!r}: wanted {wanted!r}, got {got!r}")
        if len(scores) == kinds and all(one.asked == each for one in scores.values()):
            break
    for name, score in sorted(scores.items()):
        report(name, score)


def main() -> None:
    """Ask about new drawings and strange voices and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--projector", type=Path, default=PROJECTOR)
    parser.add_argument("--recordings", type=Path, help="the folder of sound.speech")
    parser.add_argument("--fonts", type=Path, help="a folder with the fonts that are held out")
    parser.add_argument("--each", type=int, default=100, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the wrong answers")
    parser.add_argument("--thinking", action="store_true", help="as the server asks by default")
    options = parser.parse_args()
    senses = Senses(options.projector, options.model, options.threads, thinking=options.thinking)
    print("| Kind | n | right |\n| --- | ---: | ---: |")
    rng = Random(options.seed)
    evaluate(senses.ask, about_pictures(rng), 7, options.each, options.show)
    if options.fonts:
        printed = list(fonts.find(options.fonts, held_out=True))
        evaluate(
            senses.ask,
            about_prints(rng, printed),
            len(SIZES) * len(INKS),
            options.each,
            options.show,
        )
    if options.recordings:
        voices = load(options.recordings / "held-out.npz")
        evaluate(senses.ask, about_recordings(rng, voices), 5, options.each, options.show)


if __name__ == "__main__":
    main()
