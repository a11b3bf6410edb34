"""Text that follows other text, with SentencePiece vocabularies: no space may come before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.grammar_bench import generate, refusal, schema
from tests.support.sentence_pieces import USER_DEFINED, write_sentence_pieces, write_unigrams
from trioserve import llama
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.tokens import GrammarVocab
from trioserve.types import FinishReason, Grammar, SamplingParams

VOCABULARIES = {
    "space prefix": {},
    "no space prefix": {"add_space_prefix": False},
    "no BOS": {"add_bos_token": False},
}
#: No token spells this character: in a vocabulary it stands for a space.
MARK = "\u2581"
TEXTS = st.lists(
    st.one_of(
        st.sampled_from((*USER_DEFINED, "the", " the", "  ", "42", '{"', "</s>", "<0x0A>")),
        st.text(st.characters(codec="utf-8", exclude_characters=MARK), max_size=8),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module", params=VOCABULARIES)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaBackend]:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    write_sentence_pieces(path, **VOCABULARIES[request.param])
    with llama.load(Config(model=str(path), threads=1, ctx_size=1024, parallel=1)) as backend:
        yield backend


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_a_fragment_is_spelled_to_the_byte(backend: LlamaBackend, text: str) -> None:
    tokens = backend.vocab.tokenize(text, parse_special=False, is_fragment=True)
    assert backend.vocab.detokenize(tokens) == text.encode()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=TEXTS.map(lambda text: text + MARK))
def test_so_is_what_a_grammar_forces(backend: LlamaBackend, text: str) -> None:
    assert (
        backend.vocab.detokenize(GrammarVocab(backend.vocab).split(text.encode())) == text.encode()
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the the", ["the", " the"]),
        (" the", [" the"]),
        ("<call>the x</call>42", ["<call>", "the", " x", "</call>", "42"]),
        ("42\n", ["42", "\n"]),
        ("", []),
    ],
)
def test_tokens_are_those_of_the_middle_of_a_text(
    backend: LlamaBackend, text: str, pieces: list[str]
) -> None:
    names = backend.vocab.names
    tokens = backend.vocab.tokenize(text, is_fragment=True)
    assert [names[token].decode() for token in tokens] == pieces


def test_control_tokens_in_a_fragment(backend: LlamaBackend) -> None:
    [end] = backend.vocab.end_of_generation
    tokens = backend.vocab.tokenize("a</s>b", is_fragment=True)
    assert [backend.vocab.names[token] for token in tokens] == [b"a", b"</s>", b"b"]
    assert tokens[1] == end


def test_a_long_fragment_is_cut_into_parts(backend: LlamaBackend) -> None:
    text = "ж the 42" * 2000
    tokens = backend.vocab.tokenize(text, is_fragment=True)
    assert backend.vocab.detokenize(tokens) == text.encode()


def test_a_text_still_begins_with_a_space(backend: LlamaBackend) -> None:
    prefix = b" " * (backend.vocab.detokenize(backend.vocab.tokenize("the")) != b"the")
    assert backend.vocab.detokenize(backend.vocab.tokenize("the")) == prefix + b"the"
    assert len(backend.vocab.tokenize("the")) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (schema({"const": "42"}), '"42"'),
        (schema({"const": ["the", "<call>"]}), r'\[\s*"the"\s*,\s*"<call>"\s*\]'),
        (Grammar("gbnf", 'root ::= "a"{5,5}'), "aaaaa"),
        (
            Grammar("gbnf", 'root ::= "<call>the</call>\\n" "ü' + MARK + '"'),
            "<call>the</call>\nü" + MARK,
        ),
        (Grammar("gbnf", "root ::= <call> <[4]>"), "<call>\x01"),
        (Grammar("regex", " the (42|10)"), " the (42|10)"),
    ],
)
def test_outputs_follow_their_grammars(
    backend: LlamaBackend, grammar: Grammar, pattern: str
) -> None:
    for seed in range(3):
        sampling = SamplingParams(temperature=1.5, seed=seed)
        text, reason = generate(backend, grammar, sampling=sampling)
        assert re.fullmatch(pattern, text)
        assert reason is FinishReason.EOS


def test_what_a_vocabulary_cannot_spell(tmp_path: Path) -> None:
    path = write_unigrams(tmp_path / "model.gguf")
    with llama.load(Config(model=str(path), threads=1, ctx_size=1024, parallel=1)) as unigrams:
        grammar = Grammar("gbnf", 'root ::= "the  42" [ab]')
        text, _ = generate(unigrams, grammar, sampling=SamplingParams(seed=1))
        assert text in ("the  42a", "the  42b")
        assert "no text matches it" in refusal(unigrams, Grammar("gbnf", 'root ::= "a\\nb"'))
