"""Engines on models with a head for drafts, and what they say without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import head_models
from tests.support.llama_bench import Bench
from tests.support.step_costs import FlatCosts
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import DecodeMaximal, DraftRequest, Engine
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.heads import HeadDrafter
from trioserve.types import CacheRoot, SamplingParams

#: A kind of head for each way in which drafts are made.
KINDS = ("glm4moe", "deepseek2", "step35", "gemma4", "eagle3", "dflash", "dflash2", "dspark")
#: Those that fast tests take; the others have a layer or a window more.
_FAST = ("glm4moe", "deepseek2", "step35", "eagle3", "dflash")
#: Models whose sequences can be cut with a full cache of their windows only.
WINDOWED = ("step35", "mimo2", "cohere2moe", "gemma4", "gpt-oss", "muse-glimmer")

Settings = dict[str, Any]


def kinds(*names: str) -> list[Any]:
    """The parameters of a test for heads: some are for the system tests."""
    return [
        name if name in _FAST else pytest.param(name, marks=pytest.mark.system) for name in names
    ]


def write_head(folder: Path, kind: str, *, is_good: bool, is_apart: bool = False) -> Settings:
    """Write a model with a head of this kind; returns the settings for both.

    The guesses of a good head are right about half of the time; other heads guess at random. The
    KV caches do not round. `is_apart` writes MTP heads to a separate file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec_type, head = "draft-mtp", None
    if kind == "eagle3":
        spec_type = "draft-eagle3"
        model, head = head_models.write_eagle3(folder, is_good=is_good)
    elif kind in head_models.BLOCKS:
        spec_type = "draft-dspark" if kind == "dspark" else "draft-dflash"
        model, head = head_models.write_blocks(folder, kind, is_good=is_good)
    elif kind == "gemma4":
        model, head = head_models.write_assistant(folder, is_good=is_good)
    elif is_apart:
        model, head = head_models.write_apart(folder, kind, is_good=is_good)
    else:
        model = head_models.write_mtp(folder, kind, is_good=is_good)
    return settings_for(model, spec_type, head, has_window=kind in WINDOWED)


def settings_for(model: Path, spec_type: str, head: Path | None, *, has_window: bool) -> Settings:
    """Return the settings for a model and a head."""
    settings: Settings = {"model": str(model), "spec_type": (spec_type,), "swa_full": has_window}
    if head is not None:
        settings["spec_draft_model"] = str(head)
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
        return drafter_of(self.backend)

    def step(self) -> bool:
        """Take a step; returns whether there is more to do."""
        work_left = super().step()
        self.head.check_integrity()
        return work_left

    @property
    def n_accepted(self) -> int:
        """The number of accepted draft tokens in all finished requests."""
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


def load(settings: Settings, **more: object) -> LlamaBackend:
    """Load a model with its head, without an engine."""
    backend = llama.load(Config(threads=1, **{**settings, **more}))
    assert isinstance(backend, LlamaBackend)
    return backend


def drafter_of(backend: LlamaBackend) -> HeadDrafter:
    """Return the head's drafter."""
    (drafter,) = backend.drafters
    assert isinstance(drafter, HeadDrafter)
    return drafter


class Hand:
    """A model with a head, used without an engine. Each sequence has a text."""

    def __init__(self, backend: LlamaBackend) -> None:
        self.backend, self.drafter = backend, drafter_of(backend)
        self.memory = backend.memory
        self.texts: list[tuple[int, ...]] = [()] * backend.n_seqs

    def extend(self, *added: tuple[int, Sequence[int]]) -> list[int]:
        """Decode tokens of some sequences together; returns the best token after each."""
        batch = self.backend.batch
        batch.clear()
        rows = []
        for seq, tokens in added:
            rows.append(batch.extend(tokens, len(self.texts[seq]), seq))
            batch.want_logits(rows[-1])
            self.texts[seq] += tuple(tokens)
        self.backend.decode()
        with self.backend.sampler(SamplingParams(temperature=0.0), ()) as sampler:
            return [sampler.sample(row) for row in rows]

    def draft(self, newest: dict[int, int], n_max: int = 4) -> list[list[int]]:
        """Ask for drafts of some sequences, each with a token that is not decoded yet.

        Asks again until the head has caught up with all of them.
        """
        requests = [
            DraftRequest(seq, [*self.texts[seq], token], CacheRoot(), n_max, seq)
            for seq, token in newest.items()
        ]
        while True:
            drafts = self.drafter.propose(requests)
            if None not in drafts:
                return [draft for draft in drafts if draft is not None]

    def has_all(self, seq: int) -> bool:
        """True if the head has read all tokens of a sequence with their rows, or will read them."""
        text = self.drafter._texts[seq]
        return not text.gaps and not text.is_adrift

    def copy(self, source: int, target: int) -> None:
        """Copy a sequence over another, as the engine does."""
        self.memory.remove(target, 0)
        if self.backend.unified:
            self.memory.copy(source, target)
        else:
            self.memory.restore(target, self.memory.save(source))
        self.texts[target] = self.texts[source]

    def cut(self, seq: int, length: int) -> None:
        """Shorten a sequence, and continue from there, as the engine does with a new prompt."""
        tokens = self.texts[seq][:length]
        self.memory.remove(seq, length)
        self.texts[seq] = tokens
        if tokens and self.memory.step_back(seq, tokens[-1]):
            self.texts[seq] = tokens[:-1]
            self.drafter.check_integrity()
            self.extend((seq, tokens[-1:]))
