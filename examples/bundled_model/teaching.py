"""Teaching the eyes and the ears."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from examples.bundled_model.optimizer import Muon, schedule


class Lesson:
    """Teaches a network, with Muon for the matrices and Adam for the rest."""

    def __init__(self, model: nn.Module, heads: nn.Module, rate: float) -> None:
        learned = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in learned if p.ndim == 2 and "positions" not in n]
        known = {id(p) for p in matrices}
        rest = [p for _, p in learned if id(p) not in known] + list(heads.parameters())
        self.rate = rate
        self.muon = Muon(matrices, 0.95, 0.02)
        self.adam = torch.optim.AdamW(rest, 0, (0.9, 0.98))
        self.pool = ThreadPoolExecutor(1)

    def step(self, progress: float) -> None:
        """Apply the gradients at the rate of this time."""
        rate = self.rate * schedule(progress)
        for group in self.adam.param_groups:
            group["lr"] = rate * 0.15
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step(rate, self.pool)
