"""Models with random weights: their shapes, and the pair of a model and its draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.system
def test_the_draft_of_a_made_pair_is_mostly_right(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from benchmarks import gguf_maker

    target = attrs.evolve(
        gguf_maker.PRESETS["tiny"], width=128, layers=8, faint_layers=7, bits=bits
    )
    draft = attrs.evolve(target, layers=1, faint_layers=0)
    for name, shape in (("target", target), ("draft", draft)):
        gguf_maker.write(tmp_path / name, shape)
    tokens = list(range(300, 316))
    said = continuation(tmp_path / "target", tokens, 200)
    guessed = guesses(tmp_path / "draft", tokens + said)[len(tokens) - 1 : -1]
    right = sum(a == b for a, b in zip(said, guessed, strict=True)) / len(said)
    assert 0.8 < right < 1.0
    assert len(set(said)) > 100


def test_the_presets_of_the_pair_go_together() -> None:
    pytest.importorskip("gguf")
    from benchmarks.gguf_maker import PRESETS

    pair, draft = PRESETS["pair"], PRESETS["pair-draft"]
    assert attrs.evolve(pair, layers=draft.layers, faint_layers=0) == draft
    assert pair.faint_layers == pair.layers - draft.layers
    assert list(pair.matrices())[: 1 + 7 * draft.layers] == list(draft.matrices())


@pytest.mark.parametrize(
    "change",
    [
        {"faint_layers": 2},
        {"bits": 4},
        {"vocab": 100},
        {"width": 65},
        {"heads": 3},
        {"layers": 0},
        {"ffn": 100},
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int]) -> None:
    pytest.importorskip("gguf")
    from benchmarks import gguf_maker

    with pytest.raises(ValueError, match="must be"):
        attrs.evolve(gguf_maker.PRESETS["tiny"], **change)


def opened(path: Path) -> Any:
    import llama_cpp

    return llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, logits_all=True, verbose=False)


def continuation(path: Path, tokens: list[int], count: int) -> list[int]:
    """Continue some tokens greedily."""
    model = opened(path)
    said: list[int] = []
    for token in model.generate(tokens, temp=0.0):
        said.append(token)
        if len(said) == count:
            break
    model.close()
    return said


def guesses(path: Path, tokens: list[int]) -> list[int]:
    """Return the most likely next token after each of some tokens."""
    model = opened(path)
    model.eval(tokens)
    best = model.scores[: len(tokens)].argmax(axis=1)
    model.close()
    return [int(token) for token in best]
