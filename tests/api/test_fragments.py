"""Text that the server puts after other text, with a vocabulary that puts a space before texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.sentence_pieces import write_sentence_pieces
from tests.support.served_model import ServedModel, served_model

#: A chat whose answer begins with reasoning.
TEMPLATE = (
    "{% for message in messages %}{% if message.reasoning_content %}"
    "<think>\n{{ message.reasoning_content }}\n</think>{% endif %}{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}\n<think>\n{% endif %}"
)
#: Tokens for gaps: those of bytes that no text has.
GAP = {"fim_pre_token_id": 4, "fim_suf_token_id": 5, "fim_mid_token_id": 6}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    path = write_sentence_pieces(tmp_path_factory.mktemp("models") / "model.gguf", **GAP)
    with served_model(path, parallel=1, chat_template=TEMPLATE) as served:
        yield served


def reasoning(served: ServedModel, **fields: Any) -> str:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0.0,
        "ignore_eos": True,
        "max_tokens": 40,
        **fields,
    }
    [choice] = served.post("/v1/chat/completions", body)["choices"]
    return str(choice["message"]["reasoning_content"])


def test_the_last_words_of_reasoning_follow_it_at_once(served: ServedModel) -> None:
    free = reasoning(served)
    for n_tokens in range(2, 8):
        text = reasoning(
            served, reasoning_budget_tokens=n_tokens, reasoning_budget_message="the 42"
        )
        begun = text.removesuffix("the 42")
        assert begun != text and free.startswith(begun)


@pytest.mark.parametrize(
    ("beginning", "suffix", "prompt"),
    [
        ("42", "x", "<s>\x01 the42\x02x\x03"),
        (" 42", "\n  x", "<s>\x01 the 42\x02\n  x\x03"),
        ("", "", "<s>\x01 the\x02\x03"),
    ],
)
def test_text_around_a_gap(served: ServedModel, beginning: str, suffix: str, prompt: str) -> None:
    body = {"input_prefix": "the", "prompt": beginning, "input_suffix": suffix, "n_predict": 1}
    assert served.post("/infill", body)["prompt"] == prompt


def test_a_token_that_a_grammar_names(served: ServedModel) -> None:
    body = {"prompt": "Hi", "grammar": 'root ::= <call> "the" </call>', "n_predict": 20}
    assert served.post("/completion", body)["content"] == "<call>the</call>"


def test_what_the_output_begins_with_is_not_changed(served: ServedModel) -> None:
    """Texts that are prompts keep their space, as llama-server has it."""
    tokens = served.post("/tokenize", {"content": "the", "add_special": True})["tokens"]
    assert served.post("/detokenize", {"tokens": tokens})["content"] == "<s> the"
    assert served.post("/completion", {"prompt": "the", "n_predict": 1})["prompt"] == "<s> the"
