"""Spoken digits for the ears, by many voices of espeak-ng."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import wave
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

RATE = 16_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-gb", "en-us", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-rp", "en-gb-x-gbcwmd")
#: One voice in this many is kept for the evaluation.
HELD_OUT_SHARE = 8
#: A silence at least this long parts two clips.
PAUSE = 0.3
STRINGS = 3

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Voice:
    """A way of speaking."""

    accent: str
    variant: str
    speed: int
    pitch: int

    @property
    def held_out(self) -> bool:
        """True if this variant is kept for the evaluation, in all accents."""
        return zlib.crc32(self.variant.encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Clip:
    """Digits that were spoken without a pause, and their samples."""

    digits: tuple[int, ...]
    samples: Samples


def variants() -> list[str]:
    """Ask espeak-ng for its variants, without those that whisper or croak."""
    listed = subprocess.run(
        ["espeak-ng", "--voices=variant"], capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r"!v/(\S+)", listed)
    odd = ("whisper", "robot", "demonic", "croak", "klatt", "anxious", "storm")
    return sorted({name for name in names if not any(word in name.lower() for word in odd)})


def voice(rng: Random, names: list[str]) -> Voice:
    """Choose a voice."""
    return Voice(rng.choice(ACCENTS), rng.choice(names), rng.randint(105, 215), rng.randint(15, 85))


def speak(rng: Random, who: Voice) -> list[Clip]:
    """Have a voice say every digit, and some strings of digits. Return what could be parted."""
    said = [(digit,) for digit in range(10)]
    said += [tuple(rng.randint(0, 9) for _ in range(rng.randint(2, 5))) for _ in range(STRINGS)]
    gap = '<break time="700ms"/>'
    text = gap.join(" ".join(WORDS[digit] for digit in digits) for digits in said)
    done = subprocess.run(
        ["espeak-ng", "-m", "-v", f"{who.accent}+{who.variant}", "-s", str(who.speed),
         "-p", str(who.pitch), "--stdout", f"<speak>{text}</speak>"],
        capture_output=True, check=True,
    )  # fmt: skip
    samples = _read(done.stdout)
    parts = split(samples)
    if len(parts) != len(said):
        return []
    return [Clip(digits, part) for digits, part in zip(said, parts, strict=True)]


def _read(data: bytes) -> Samples:
    """Read espeak-ng's WAV (whose header says no length) at our rate."""
    with wave.open(io.BytesIO(data)) as file:
        rate = file.getframerate()
    start = data.index(b"data") + 8
    values = np.frombuffer(data[start : start + (len(data) - start) // 2 * 2], "<i2")
    return resample(values.astype(np.float32) / 32768, rate)


def resample(samples: Samples, rate: int) -> Samples:
    """Bring samples to our rate by way of their spectrum."""
    count = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)


def split(samples: Samples) -> list[Samples]:
    """Cut at long silences, and cut the silences off."""
    frame = RATE // 100
    count = len(samples) // frame
    loud = np.abs(samples[: count * frame].reshape(count, frame)).max(1) > 0.012
    parts: list[tuple[int, int]] = []
    for index in np.flatnonzero(loud):
        if parts and index - parts[-1][1] < PAUSE * 100:
            parts[-1] = (parts[-1][0], int(index))
        else:
            parts.append((int(index), int(index)))
    return [samples[max(0, a - 1) * frame : (b + 2) * frame] for a, b in parts]


def record(seed: int, voices: int, *, held_out: bool, threads: int) -> list[list[Clip]]:
    """Record voices of one side: each is a list of clips."""
    rng, names = Random(seed), variants()
    chosen: list[Voice] = []
    while len(chosen) < voices:
        who = voice(rng, names)
        if who.held_out == held_out:
            chosen.append(who)
    seeds = [rng.random() for _ in chosen]
    with ThreadPoolExecutor(threads) as pool:
        made = pool.map(
            lambda pair: speak(Random(pair[0]), pair[1]), zip(seeds, chosen, strict=True)
        )
        return [clips for clips in made if clips]


def save(voices: list[list[Clip]], output: Path) -> None:
    """Write recordings to one file."""
    clips = [clip for voice in voices for clip in voice]
    np.savez(
        output,
        per_voice=np.array([len(voice) for voice in voices]),
        digits=np.array(["".join(map(str, clip.digits)) for clip in clips]),
        ends=np.cumsum([len(clip.samples) for clip in clips]),
        samples=(np.concatenate([clip.samples for clip in clips]) * 32767).astype(np.int16),
    )


def load(path: Path) -> list[list[Clip]]:
    """Read recordings back."""
    saved = np.load(path)
    parts = np.split(saved["samples"], saved["ends"][:-1])
    clips = iter(
        Clip(tuple(map(int, digits)), part)
        for digits, part in zip(saved["digits"].tolist(), parts, strict=True)
    )
    return [[next(clips) for _ in range(count)] for count in saved["per_voice"]]


def main() -> None:
    """Record voices for training and for the evaluation."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--voices", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (
        ("train", options.voices, False),
        ("held-out", options.voices // 8, True),
    ):
        voices = record(7, count, held_out=held_out, threads=options.threads)
        save(voices, options.output / f"{name}.npz")
        print(f"{name}: {len(voices)} voices, {sum(map(len, voices))} clips")


if __name__ == "__main__":
    main()
