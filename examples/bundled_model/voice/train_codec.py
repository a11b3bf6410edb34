"""Teach the encoder and the decoder to say the recorded words again.

With a projector, the bundled model's ears judge as well, and the decoder alone learns: the latents
stay as they are, and so does what has been trained on them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from examples.bundled_model.optimizer import schedule
from examples.bundled_model.sound.speech import WORDS as DIGITS
from examples.bundled_model.voice.codec import CodecConfig, Decoder, Encoder, LogMel
from examples.bundled_model.voice.listening import Listener
from examples.bundled_model.voice.recordings import FRAME, Samples, load

#: Latents of an example.
FRAMES = 16
#: The weight of what the ears say.
HEARING = 10


class Likeness(nn.Module):
    """The distance of two sounds: magnitudes and logarithms at three resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            LogMel(window, window // 4, bands)
            for window, bands in ((256, 24), (600, 40), (1200, 80))
        )

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean distance."""
        distance = torch.zeros(())
        for scale in self.scales:
            one, other = scale.spectrum(made), scale.spectrum(wanted)
            distance = distance + (one - other).norm() / other.norm()
            distance = distance + (one.add(1e-2).log10() - other.add(1e-2).log10()).abs().mean()
            one, other = scale.filters @ one, scale.filters @ other
            distance = distance + 2 * (one.add(1e-3).log10() - other.add(1e-3).log10()).abs().mean()
        return distance / len(self.scales)


def examples(rng: Random, words: dict[str, Samples], count: int) -> Tensor:
    """Return (count, samples): words and silence one after another, cut out at frames."""
    names, made = list(words), []
    for _ in range(count):
        parts: list[Samples] = []
        length = 0
        while length < (FRAMES + 6) * FRAME:
            roll = rng.random()
            word = words[rng.choice(DIGITS if roll < 0.3 else names)]
            parts += [word] if roll > 0.1 else [np.zeros(FRAME * rng.randint(1, 4), np.float32)]
            length += len(parts[-1])
        start = rng.choice((0, rng.randint(0, 5))) * FRAME
        made.append(np.concatenate(parts)[start : start + FRAMES * FRAME])
    return torch.from_numpy(np.stack(made))


def main() -> None:
    """Teach the codec until the time is up."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--ears", type=Path, help="the bundled model's projector")
    parser.add_argument("--minutes", type=float, default=18)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rng, words = Random(0), load(options.recordings)
    config = CodecConfig()
    encoder, decoder, likeness = Encoder(config), Decoder(config), Likeness()
    if options.resume:
        saved = torch.load(options.resume, weights_only=True)
        encoder.load_state_dict(saved["encoder"])
        decoder.load_state_dict(saved["decoder"])
    listener = Listener(options.ears) if options.ears else None
    encoder.requires_grad_(listener is None)
    parameters = [*decoder.parameters(), *(p for p in encoder.parameters() if p.requires_grad)]
    print(f"{sum(p.numel() for p in decoder.parameters())} parameters", flush=True)
    adam = torch.optim.AdamW(parameters, options.rate, betas=(0.8, 0.98), weight_decay=0.01)
    start, steps, mean = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        wanted = examples(rng, words, options.batch)
        latents = encoder(wanted)
        made = decoder(latents + options.noise * torch.randn_like(latents))
        loss = likeness(made, wanted)
        if listener is not None:
            loss = loss + HEARING * listener(made, wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in adam.param_groups:
            group["lr"] = options.rate * schedule(progress)
        adam.step()
        adam.zero_grad()
        steps += 1
        mean += float(loss.detach())
        if steps % 50 == 0:
            print(f"{steps} {progress:.3f} {mean / 50:.4f}", flush=True)
            mean = 0.0
        if steps % 200 == 0:
            save(options.output, encoder, decoder)
    save(options.output, encoder, decoder)


def save(output: Path, encoder: Encoder, decoder: Decoder) -> None:
    """Write a checkpoint."""
    part = output.with_suffix(".part")
    saved = {"config": asdict(decoder.config), "encoder": encoder.state_dict()}
    torch.save(saved | {"decoder": decoder.state_dict()}, part)
    part.replace(output)


if __name__ == "__main__":
    main()
