"""Teach the speaker which latents belong to a text.

A latent also tells the place in the text, in numbers that the decoder does not hear: how many rows
the word is behind, and how many frames are left of it. The speaker makes these from those of the
frame before. So it has to correct its errors, which otherwise add up.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.sound.speech import WORDS as DIGITS
from examples.bundled_model.teaching import Lesson
from examples.bundled_model.voice.codec import CodecConfig, Encoder
from examples.bundled_model.voice.lexicon import BEGIN, PAUSES, SPACE, Tokens
from examples.bundled_model.voice.recordings import FRAME, Samples, load
from examples.bundled_model.voice.speaker import Speaker, SpeakerConfig

#: Silent frames before a text and behind it.
LEAD, TAIL = 1, 6
#: A row of zeros, among the tokens.
NOTHING = -1
#: The speeds of a place: those at which heads of 32 numbers turn.
SPEEDS = 10000.0 ** (-torch.arange(8) / 16)
PLACE = 4 * len(SPEEDS)
#: Frames with about the same error of the place, how far the errors of `behind` and `left` spread,
#: and the largest: a word may be two rows long.
STRETCH, SPREAD, MOST = 8, torch.tensor([0.45, 0.3]), 0.9
#: How loud the length of a word is beside its latents.
LOUD = 10.0
#: Additional weight of the place in the first frame of a word, which decides its length.
HEED = 5.0
#: Rounds in which the speaker hears frames that it has made.
AGAIN = (0, 1, 1, 2)


def place(behind: Tensor, left: Tensor) -> Tensor:
    """Return what latents tell of their places in the text."""
    angles = torch.cat((behind[:, None] * SPEEDS, left[:, None] * SPEEDS), 1)
    return torch.cat((angles.cos(), angles.sin()), 1)


def mistaken(shape: torch.Size, spread: Tensor) -> Tensor:
    """Return (..., 2) errors of places. A speaker cannot average them out over several frames."""
    count, places = shape
    lasting = torch.randn(count, places // STRETCH + 2, 2).repeat_interleave(STRETCH, 1)
    lasting = lasting[:, torch.randint(STRETCH, ()) :][:, :places]
    return ((lasting + 0.4 * torch.randn(count, places, 2)) * spread).clamp(-MOST, MOST)


def turn(places: Tensor, errors: Tensor) -> Tensor:
    """Return what latents tell of places, off by errors."""
    angles = (errors[..., None] * SPEEDS).flatten(-2)
    cos, sin = places.chunk(2, -1)
    turned = (
        cos * angles.cos() - sin * angles.sin(),
        sin * angles.cos() + cos * angles.sin(),
    )
    return torch.cat(turned, -1)


class Table(nn.Module):
    """Embeddings of tokens; those of words begin as a map of their latents."""

    def __init__(self, tokens: Tokens, frames: Frames, width: int) -> None:
        super().__init__()
        self.own = nn.Embedding(len(tokens.rows), width)
        longest = max(map(len, frames.words.values()))
        heard = torch.zeros(len(tokens.rows), longest, frames.silence.shape[0] + 1)
        for word, latents in frames.words.items():
            pieces = [str(DIGITS.index(word))] if word in DIGITS else []
            for piece in (*pieces, word):
                if piece in tokens.row:
                    heard[tokens.row[piece], -len(latents) :, :-1] = latents
                    heard[tokens.row[piece], -len(latents), -1] = LOUD
        self.heard = heard.flatten(1) / heard[0].numel() ** 0.5
        start = torch.zeros(width, longest, frames.silence.shape[0] + 1)
        start[:, :, -1] = torch.randn(width, longest) * 1.5
        self.map = nn.Parameter(start.flatten(1))

    def weight(self) -> Tensor:
        """Return the embeddings."""
        return self.own.weight + functional.linear(self.heard, self.map)


@dataclass(frozen=True)
class Frames:
    """Latents of words and of silence, of mean zero and deviation one."""

    words: dict[str, Tensor]
    silence: Tensor
    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class Example:
    """A text's tokens, its latents, how many come before the end, and which begin a word."""

    tokens: list[int]
    latents: Tensor
    length: int
    first: Tensor


@torch.no_grad()
def encode(encoder: Encoder, words: dict[str, Samples]) -> Frames:
    """Encode every word amid silence."""
    made = {}
    for word, samples in words.items():
        padded = functional.pad(torch.from_numpy(samples), (2 * FRAME, 2 * FRAME))
        made[word] = encoder(padded[None])[0, 2:-2]
    silence = encoder(torch.zeros(1, 8 * FRAME))[0, 4]
    every = torch.cat([*made.values(), silence[None]])
    mean, deviation = every.mean(0), every.std(0)
    made = {word: (latents - mean) / deviation for word, latents in made.items()}
    silence = (silence - mean) / deviation
    mean, deviation = (
        torch.cat((mean, torch.zeros(PLACE))),
        torch.cat((deviation, torch.ones(PLACE))),
    )
    return Frames(made, silence, mean, deviation)


def example(rng: Random, frames: Frames, tokens: Tokens, count: int, spell: float) -> Example:
    """Say `count` words: digits, or words of the lexicon, with signs between them."""
    names = list(frames.words)
    only_digits = rng.random() < 0.2
    # As after a recording of a voice, which says nothing here.
    written = [NOTHING] * (rng.randint(1, 60) if rng.random() < 0.05 else 0)
    said = [(len(written), frames.silence.expand(LEAD, -1))]
    for index in range(count):
        word = rng.choice(DIGITS if only_digits or rng.random() < 0.1 else names)
        said.append((len(written), frames.words[word]))
        digit = str(DIGITS.index(word)) if word in DIGITS else None
        written += tokens.write(rng, word, digit, spell)
        if rng.random() < 0.04:
            written.append(tokens.row[SPACE])
        if index < count - 1 and rng.random() < 0.15:
            sign = rng.choice(list(PAUSES))
            said.append((len(written), frames.silence.expand(PAUSES[sign], -1)))
            written.append(tokens.row[sign])
    if rng.random() < 0.75:
        written.append(tokens.row["."])
    length = sum(len(part) for _, part in said)
    said.append((len(written), frames.silence.expand(TAIL, -1)))
    written.append(tokens.row[BEGIN])
    starts = torch.cat([torch.full((len(part),), start) for start, part in said])
    left = torch.cat([torch.arange(len(part), 0, -1) for _, part in said])
    places = place(len(written) + torch.arange(len(starts)) - starts, left)
    latents = torch.cat((torch.cat([part for _, part in said]), places), 1)
    first = functional.pad(left[:-1] == 1, (1, 0), value=True)
    return Example(written, latents, length, first)


class Batch:
    """Examples one below another: tokens, then frames, then nothing."""

    def __init__(self, examples: list[Example], latent: int) -> None:
        places = max(len(one.tokens) + len(one.latents) for one in examples)
        self.tokens = torch.zeros(len(examples), places, dtype=torch.long)
        self.inputs = torch.zeros(len(examples), places, latent)
        self.wanted = torch.zeros(len(examples), places, latent)
        self.is_token = torch.zeros(len(examples), places, dtype=torch.bool)
        self.counts = torch.zeros(len(examples), places, dtype=torch.bool)
        self.ended = torch.zeros(len(examples), places)
        self.heed = torch.ones(len(examples), places)
        self.blur = torch.cat((torch.full((latent - PLACE,), 0.4), torch.full((PLACE,), 0.15)))
        for index, one in enumerate(examples):
            text, count = len(one.tokens), len(one.latents)
            self.tokens[index, :text] = torch.tensor(one.tokens)
            self.is_token[index, :text] = True
            self.inputs[index, text : text + count] = one.latents
            self.wanted[index, text - 1 : text - 1 + count] = one.latents
            self.counts[index, text - 1 : text - 1 + count] = True
            self.ended[index, text - 1 + one.length :] = 1
            self.heed[index, text - 1 : text - 1 + count] += HEED * one.first

    def rows(self, table: Table, speaker: Speaker, latents: Tensor, noise: float) -> Tensor:
        """Return the speaker's input. Frames are not exact, as its own will not be."""
        sound, places = latents.split((latents.shape[-1] - PLACE, PLACE), -1)
        places = turn(places, mistaken(self.tokens.shape, noise * SPREAD))
        frames = torch.cat((sound, places), -1)
        frames = frames + noise * torch.randn_like(frames) * self.blur
        frames = functional.linear(frames, speaker.frame)
        texts = functional.embedding(self.tokens.clamp(min=0), table.weight())
        texts = texts * (self.tokens != NOTHING)[..., None]
        return torch.where(self.is_token[..., None], texts, frames)

    def loss(self, table: Table, speaker: Speaker, noise: float, again: int) -> Tensor:
        """Return the distances of the sound and of the places, and the loss of the end.

        In each of `again` rounds, the speaker hears what it made in the one before.
        """
        heard = self.inputs
        with torch.no_grad():
            for _ in range(again):
                made, _ = speaker(self.rows(table, speaker, heard, noise))
                heard = functional.pad(made[:, :-1], (0, 0, 1, 0))
                noise *= 0.6
        latents, scores = speaker(self.rows(table, speaker, heard, noise))
        off = (latents - self.wanted)[self.counts].square()
        end = functional.binary_cross_entropy_with_logits(
            scores[self.counts], self.ended[self.counts]
        )
        places = off[:, -PLACE:].mean(-1) * self.heed[self.counts]
        return torch.stack((off[:, :-PLACE].mean(), places.mean(), end))


def main() -> None:
    """Teach the speaker until the time is up."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--most", type=int, default=12, help="words in a row")
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rng, words = Random(0), load(options.recordings)
    codec = torch.load(options.codec, weights_only=True)
    encoder = Encoder(CodecConfig(**codec["config"]))
    encoder.load_state_dict(codec["encoder"])
    frames, tokens = encode(encoder, words), Tokens(tuple(words))
    config = SpeakerConfig(len(tokens.rows), codec["config"]["latent"] + PLACE)
    speaker, table = Speaker(config), Table(tokens, frames, config.width)
    if options.resume:
        saved = torch.load(options.resume, weights_only=True)
        speaker.load_state_dict(saved["speaker"])
        table.own.load_state_dict(saved["table"])
        nn.init.zeros_(table.map)
    print(f"{sum(p.numel() for p in speaker.parameters())} parameters", flush=True)
    lesson = Lesson(speaker, table, options.rate)
    start, steps, mean = time.monotonic(), 0, torch.zeros(3)
    while (progress := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        most = 1 + round((options.most - 1) * (1 if options.resume else min(1, 2 * progress)))
        count = rng.randint(1, most)
        said = [
            example(rng, frames, tokens, count, 0.1)
            for _ in range(max(4, options.batch * 3 // (count + 2)))
        ]
        losses = Batch(said, config.latent).loss(table, speaker, options.noise, rng.choice(AGAIN))
        losses.sum().backward()
        lesson.step(progress)
        steps += 1
        mean += losses.detach()
        if steps % 50 == 0:
            told = " ".join(f"{one:.4f}" for one in (mean / 50).tolist())
            print(f"{steps} {progress:.3f} words {most} {told}", flush=True)
            mean.zero_()
        if steps % 200 == 0:
            save(options.output, speaker, table, frames)
    save(options.output, speaker, table, frames)


@torch.no_grad()
def save(output: Path, speaker: Speaker, table: Table, frames: Frames) -> None:
    """Write a checkpoint."""
    part = output.with_suffix(".part")
    saved = {
        "config": asdict(speaker.config),
        "speaker": speaker.state_dict(),
        "table": {"weight": table.weight()},
        "words": list(frames.words),
        "mean": frames.mean,
        "deviation": frames.deviation,
    }
    torch.save(saved, part)
    part.replace(output)


if __name__ == "__main__":
    main()
