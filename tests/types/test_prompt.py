from __future__ import annotations

import pytest

from trioserve.errors import InvalidRequestError
from trioserve.types import EmbeddingTask, Prompt, place_of


def test_a_prompt_of_tokens_has_a_cell_a_position_and_a_key_for_each() -> None:
    prompt = Prompt([5, 3, 9])
    assert prompt.tokens == tuple(prompt.keys) == (5, 3, 9)
    assert len(prompt) == prompt.n_positions == 3
    assert prompt == Prompt((5, 3, 9)) != Prompt((5, 3))
    assert repr(prompt) == "Prompt(tokens=(5, 3, 9))"


def test_unknown_tokens_are_refused() -> None:
    prompt = Prompt([5, 3, 9])
    prompt.check(10, "prompt")
    Prompt(()).check(1, "prompt")
    with pytest.raises(InvalidRequestError, match=r"'input' has an unknown token, 9: .* 0 to 8"):
        prompt.check(9, "input")
    with pytest.raises(InvalidRequestError, match="unknown token, -2") as caught:
        Prompt([5, -2]).check(10, "prompt")
    assert caught.value.param == "prompt"


def test_the_texts_of_an_embedding_task() -> None:
    assert EmbeddingTask(1, ((1, 2, 3), (7,))).prompt == Prompt((1, 2, 3, 7))
    assert [place_of(1, texts, "input") for texts in ("ab", "a")] == ["input[1]", "input"]
