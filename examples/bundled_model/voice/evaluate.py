"""Let the voice speak and the bundled model listen, and count what it understands.

With the recordings, measure also how like them the words are, each at its place in the text.
"""

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
from examples.bundled_model.voice.recordings import FRAME, RATE, STEP, Samples, load, resample

VOICE = BUNDLED.with_name("bundled-voice.gguf")

#: Samples of a spectrum, and the lowest of its frequencies, up to 6 kHz, that are compared.
WINDOW, LOWEST = 2 * STEP, 60


def spectra(samples: Samples) -> Samples:
    """Return logarithms of magnitudes, of windows one after another."""
    windows = samples[: len(samples) // WINDOW * WINDOW].reshape(-1, WINDOW)
    return np.log10(np.abs(np.fft.rfft(windows * np.hanning(WINDOW)))[:, :LOWEST] + 1e-2)


def likeness(voice: Voice, words: dict[str, Samples], rng: Random, count: int) -> float:
    """Say `count` words; return how their spectra correlate with those of the recordings."""
    text = [rng.choice([word for word in words if len(word) > 1]) for _ in range(count)]
    samples, start, found = voice.speak(" ".join(text)), FRAME, []
    for word in text:
        said, wanted = samples[start : start + len(words[word])], words[word]
        said = np.pad(said, (0, len(wanted) - len(said)))
        with np.errstate(invalid="ignore"):  # nothing said
            one, other = spectra(said).ravel(), spectra(wanted).ravel()
            found.append(np.nan_to_num(np.corrcoef(one, other)[0, 1]))
        start += len(wanted)
    return float(np.mean(found))


def main() -> None:
    """Speak digits, alone and in rows, and print what is understood."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=VOICE)
    parser.add_argument(
        "--projector", type=Path, default=VOICE.with_name("bundled-voice-mmproj.gguf")
    )
    parser.add_argument("--seeds", type=int, default=5, help="times that each digit is said alone")
    parser.add_argument("--each", type=int, default=40, help="rows of digits of each length")
    parser.add_argument("--recordings", type=Path, help="measure other words, too")
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
    if options.recordings:
        words = load(options.recordings)
        print("| Words | n | correlation |\n| --- | ---: | ---: |")
        for count in (1, 2, 4, 8, 12, 16, 20):
            texts = [likeness(voice, words, rng, count) for _ in range(options.each)]
            print(f"| {count} | {options.each} | {np.median(texts):.2f} |")


if __name__ == "__main__":
    main()
