"""Engines on models with a head for drafts, and what they say without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import tiny_models
from tests.support.llama_bench import Bench
from tests.support.step_costs import FlatCosts
from trioserve.engine import DecodeMaximal, Engine
from trioserve.llama.heads import HeadDrafter


#: Architectures with an MTP head, and kinds of heads in a file of their own.
KINDS = ("glm4moe", "deepseek2", "eagle3", "dflash")

Settings = dict[str, Any]


def write_head(folder: Path, kind: str, *, is_good: bool) -> Settings:
    """Write a model with a head of this kind; returns the settings for both.

    A good one is right about as often as not; the others guess at random. There is no rounding in
    the KV caches.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = None
    if kind == "eagle3":
        model, head = tiny_models.write_eagle3(folder, faint=0.1 if is_good else 1.0)
    elif kind == "dflash":
        model, head = tiny_models.write_dflash(folder, repeats=is_good)
    else:
        model = tiny_models.write_mtp(folder, kind, faint=0.2 if is_good else 1.0)
    settings: Settings = {"model": str(model), "spec_type": ("draft-mtp",)}
    if head is not None:
        settings |= {"spec_type": (f"draft-{kind}",), "spec_draft_model": str(head)}
    exact = ("cache_type_k", "cache_type_v", "spec_draft_type_k", "spec_draft_type_v")
    return {**settings, **dict.fromkeys(exact, "f32"), "parallel": 3, "ctx_size": 1536}


def without_head(settings: Settings) -> Settings:
    """Return the settings of the model alone."""
    return {name: one for name, one in settings.items() if not name.startswith("spec_")}


class Drafted(Bench):
    """An engine that always makes drafts, and looks at the head after each step."""

    def __init__(
        self, settings: Settings, *, cache_ram: int = 0, shifts: bool = False, **more: Any
    ) -> None:
        super().__init__(cache_ram, **{**settings, **more})
        if shifts:
            self.engine = Engine(self.backend, DecodeMaximal(), lambda: None, context_shift=True)
        self.engine.drafts.use(self.backend.drafters)
        self.engine.drafts.costs = FlatCosts()

    @property
    def head(self) -> HeadDrafter:
        """The drafter."""
        (drafter,) = self.backend.drafters
        assert isinstance(drafter, HeadDrafter)
        return drafter

    def step(self) -> bool:
        """Take a step; returns whether there is more to do."""
        work_left = super().step()
        self.head.check_integrity()
        return work_left

    @property
    def n_accepted(self) -> int:
        """How many tokens of drafts were right, in all requests that have ended."""
        return sum(end.timings.draft_n_accepted for end in self.finished.values())


def plain(
    settings: Settings, prompts: Sequence[str | Sequence[int]], n: int, **options: object
) -> list[list[int]]:
    """Return what a server without drafts says to each of some prompts."""
    bench = Bench(**without_head(settings))
    for i, prompt in enumerate(prompts):
        bench.submit(i, prompt, n, **options)
    bench.run()
    bench.backend.close()
    return [bench.tokens[i] for i in range(len(prompts))]
