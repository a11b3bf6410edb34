"""Words spoken by espeak-ng on one note, each cut to whole frames of the voice.

The note has exactly one period in a step of the decoder, which makes a voiced sound a steady
output. Words are recorded alone, so that a word has the same frames in every text.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.bundled_model.voice.lexicon import lexicon

RATE = 24_000
#: Samples of a latent, and of a step of the decoder's transformer.
FRAME, STEP = 1920, 120
NOTE = RATE / STEP
VOICE = ["-v", "en-us+f3", "-s", "150", "-p", "61"]
SPELLED = "abcdefghijklmnopqrstuvwxyz"

Samples = npt.NDArray[np.float32]


def speak(text: str) -> tuple[Samples, int]:
    """Have espeak-ng say a text on one note; return samples and their rate."""
    ssml = f'<speak><prosody range="0">{text}</prosody></speak>'
    said = subprocess.run(
        ["espeak-ng", "-m", *VOICE, "--stdout", ssml], capture_output=True, check=True
    ).stdout
    start = said.index(b"data") + 8  # the header tells no length
    values = np.frombuffer(said[start : start + (len(said) - start) // 2 * 2], "<i2")
    return values.astype(np.float32) / 32768, int.from_bytes(said[24:28], "little")


def note(samples: Samples, rate: int) -> float:
    """Measure the pitch of a long voiced sound, by twenty periods."""
    middle = samples[len(samples) // 4 :][: rate // 2]
    power = np.abs(np.fft.rfft(middle, 1 << 17)) ** 2
    agrees = np.fft.irfft(power)
    near = rate / NOTE
    first = int(near * 0.9) + int(agrees[int(near * 0.9) : int(near * 1.1)].argmax())
    low, high = int(first * 20 - near / 2), int(first * 20 + near / 2)
    return rate * 20 / (low + int(agrees[low:high].argmax()))


def resample(samples: Samples, factor: float) -> Samples:
    """Stretch samples by a factor, by way of their spectrum."""
    count = round(len(samples) * factor)
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * factor).astype(np.float32)


def cut(samples: Samples) -> Samples:
    """Cut silence off, and fill the last frame up with it."""
    loud = np.flatnonzero(np.abs(samples) > 0.01)
    first, last = max(0, loud[0] - RATE // 100), loud[-1] + RATE // 50
    kept = samples[first:last]
    gap = RATE // 50
    return np.pad(kept, (0, gap + -(len(kept) + gap) % FRAME))


def record(words: tuple[str, ...]) -> list[Samples]:
    """Record words."""
    long, rate = speak("aaaaaah ooooooh")
    factor = note(long, rate) / NOTE * RATE / rate
    made = []
    for word in words:
        text = f'<say-as interpret-as="characters">{word}</say-as>' if len(word) == 1 else word
        made.append(cut(resample(speak(text)[0], factor)))
    loudest = max(float(np.abs(samples).max()) for samples in made)
    return [samples * (0.7 / loudest) for samples in made]


def load(path: Path) -> dict[str, Samples]:
    """Read recordings back."""
    saved = np.load(path)
    parts = np.split(saved["samples"].astype(np.float32) / 32767, saved["ends"][:-1])
    return dict(zip(saved["words"].tolist(), parts, strict=True))


def main() -> None:
    """Record the words of the voice."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    words = lexicon()
    made = record(words)
    np.savez(
        options.output,
        words=np.array(words),
        ends=np.cumsum([len(samples) for samples in made]),
        samples=(np.concatenate(made) * 32767).astype(np.int16),
    )
    print(f"{len(words)} words, {sum(map(len, made)) / RATE:.0f} seconds")


if __name__ == "__main__":
    main()
