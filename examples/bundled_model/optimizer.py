"""Muon for the matrices, Adam for the rest, and the schedule of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(stack: Tensor, steps: int = 5) -> Tensor:
    """Bring a stack of matrices near their nearest orthogonal ones."""
    a, b, c = NEWTON_SCHULZ
    flip = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if flip else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if flip else x


class Muon:
    """Momentum whose updates are orthogonal matrices. Same shapes go in one stack."""

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float, decay: float) -> None:
        self.momentum = momentum
        self.decay = decay
        self.stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.stacks[parameter.shape].append(parameter)
        self.buffers = {
            shape: torch.zeros(len(group), *shape) for shape, group in self.stacks.items()
        }

    def step(self, rate: float, pool: Executor) -> None:
        """Apply the gradients and drop them, a stack at a time on each core."""
        by_cost = sorted(self.stacks, key=lambda shape: -shape.numel() * len(self.stacks[shape]))
        list(pool.map(lambda shape: self._step_stack(shape, rate), by_cost))

    @torch.no_grad()
    def _step_stack(self, shape: torch.Size, rate: float) -> None:
        group, buffer = self.stacks[shape], self.buffers[shape]
        gradient = torch.stack([p.grad for p in group if p.grad is not None])
        buffer.lerp_(gradient, 1 - self.momentum)
        update = orthogonalize(gradient.lerp(buffer, self.momentum))
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for parameter, change in zip(group, update, strict=True):
            parameter.mul_(1 - rate * self.decay).add_(change, alpha=-rate * scale)
            parameter.grad = None


def schedule(progress: float, warmup: float = 0.01, cooldown: float = 0.9) -> float:
    """Return the share of the full rate: up, level, then straight down to zero."""
    if progress < warmup:
        return progress / warmup
    return min(1.0, max(0.0, (1 - progress) / cooldown))
