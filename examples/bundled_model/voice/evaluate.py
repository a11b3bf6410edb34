"""Let the voice speak and the bundled model listen, and count what it understands."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import numpy as np

from examples.bundled_model.evaluate import Score, report
from examples.bundled_model.media import BUNDLED, MARK, PROJECTOR
from examples.bundled_model.senses import Senses
from examples.bundled_model.sound.questions import TRANSCRIBE, answer
from examples.bundled_model.sound.speech import RATE as HEARD, WORDS
from examples.bundled_model.voice.finished import Voice
from examples.bundled_model.voice.recordings import RATE, resample

VOICE = BUNDLED.with_name("bundled-voice.gguf")


def main() -> None:
    """Speak digits, alone and in rows, and print what is understood."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=VOICE)
    parser.add_argument(
        "--projector", type=Path, default=VOICE.with_name("bundled-voice-mmproj.gguf")
    )
    parser.add_argument("--seeds", type=int, default=5, help="times that each digit is said alone")
    parser.add_argument("--each", type=int, default=40, help="rows of digits of each length")
    parser.add_argument("--show", action="store_true", help="print what is misheard")
    options = parser.parse_args()
    voice, senses, rng = Voice(options.model, options.projector), Senses(PROJECTOR), Random(1)
    asked = [((digit,), seed) for digit in range(10) for seed in range(options.seeds)]
    for count in (2, 3, 4, 5):
        asked += [
            (tuple(rng.randint(0, 9) for _ in range(count)), seed) for seed in range(options.each)
        ]
    scores: dict[str, Score] = {}
    seconds = busy = 0.0
    for digits, seed in asked:
        text = " ".join(WORDS[digit] if seed % 2 else str(digit) for digit in digits)
        begun = time.process_time()
        samples = voice.speak(text, seed)
        busy += time.process_time() - begun
        seconds += len(samples) / RATE
        heard = senses.ask(TRANSCRIBE + MARK, resample(samples, HEARD / RATE).astype(np.float32))
        wanted = answer(digits)
        score = scores.setdefault(f"{len(digits)} digits", Score())
        score.asked, score.right = score.asked + 1, score.right + (heard == wanted)
        if options.show and heard != wanted:
            print(f"  {text!r} ({len(samples) / RATE:.2f} s): wanted {wanted!r}, heard {heard!r}")
    print("| Kind | n | right |\n| --- | ---: | ---: |")
    for name, score in sorted(scores.items()):
        report(name, score)
    print(f"{seconds / busy:.1f} seconds of sound in a second")


if __name__ == "__main__":
    main()
