"""Batches of pictures for training."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor

from examples.bundled_model.vision.drawings import Drawing
from examples.bundled_model.vision.paint import Picture, choose_color, paint


def normal(pictures: Tensor) -> Tensor:
    """Bring values from 0..1 to what the encoder takes."""
    return (pictures - 0.5) / 0.5


def batch(
    rng: Random, drawings: list[Drawing], noise: float = 0.02
) -> tuple[Tensor, list[Picture]]:
    """Paint drawings for training, with a little noise."""
    shown, painted = [], []
    for drawing in drawings:
        color = choose_color(rng, drawing)
        painted.append(paint(rng, drawing, color))
        shown.append(Picture(color, drawing.shape, drawing.number))
    pictures = torch.from_numpy(np.stack(painted))
    pictures += torch.randn_like(pictures) * (noise * rng.random())
    return normal(pictures.clamp_(0, 1)), shown
