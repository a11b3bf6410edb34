from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ServerClosingError
from trioserve.llama import vocab as vocab_module
from trioserve.llama.library import lib
from trioserve.llama.vocab import LlamaVocab, _word_limit


@pytest.fixture(scope="module")
def vocab() -> Iterator[LlamaVocab]:
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        yield backend.vocab


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_text_comes_back(vocab: LlamaVocab, text: str) -> None:
    tokens = vocab.tokenize(text, parse_special=False)
    assert vocab.detokenize(tokens) == text.encode()
    assert all(0 <= token < vocab.n_tokens for token in tokens)


@given(tokens=st.lists(st.integers(0, 2000), max_size=30))
def test_detokenizing_joins_pieces(vocab: LlamaVocab, tokens: list[int]) -> None:
    assert vocab.detokenize(tokens) == b"".join(vocab.names[t] for t in tokens)


def test_control_tokens_are_read_when_asked_for(vocab: LlamaVocab) -> None:
    [start] = vocab.tokenize("<|im_start|>")
    assert len(vocab.tokenize("<|im_start|>", parse_special=False)) > 1
    assert vocab.pieces[start] == b""
    assert vocab.detokenize([start]) == b"<|im_start|>"


def test_there_is_a_piece_for_each_token(vocab: LlamaVocab) -> None:
    assert len(vocab.pieces) == len(vocab.names) == vocab.n_tokens
    assert vocab.name_of(-1) == ""


def test_the_kinds_of_tokens_are_those_of_llama_cpp(vocab: LlamaVocab) -> None:
    tables = zip(vocab.pieces, vocab.names, strict=True)
    named = [token for token, (piece, name) in enumerate(tables) if piece != name]
    ends = {token for token in range(vocab.n_tokens) if lib.llama_vocab_is_eog(vocab.handle, token)}
    assert named == [*vocab.control] != []
    assert ends == vocab.end_of_generation
    assert all(vocab.names[token] == name for token, name in enumerate(vocab.names))
    assert vocab.max_token_bytes == max(map(len, vocab.names))


def test_a_token_that_does_not_exist_has_no_name(vocab: LlamaVocab) -> None:
    for token in (vocab.n_tokens, 2**40):
        with pytest.raises(IndexError):
            vocab.names[token]


def test_plain_text_may_end_an_output() -> None:
    config = Config(threads=1, ctx_size=256, parallel=1)
    with llama.load(config) as backend:
        [plain] = backend.vocab.tokenize("a", is_fragment=True)
        assert plain not in backend.vocab.end_of_generation
    override = f"tokenizer.ggml.eos_token_id=int:{plain}"
    with llama.load(attrs.evolve(config, override_kv=(override,))) as backend:
        assert plain in backend.vocab.end_of_generation


def test_no_name_is_read_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, to_piece = set(), vocab_module.short.llama_token_to_piece

    def note(handle: Any, token: int, *others: Any) -> int:
        read.add(token)
        size: int = to_piece(handle, token, *others)
        return size

    monkeypatch.setattr(vocab_module.short, "llama_token_to_piece", note)
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        vocab = backend.vocab
        assert read <= {vocab.bos, vocab.eos, *vocab.control}
        assert vocab.detokenize(vocab.tokenize("Once")) == b"Once"
        assert read > {vocab.bos, vocab.eos}


def test_half_a_surrogate_pair_is_refused(vocab: LlamaVocab) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate pair at character 2"):
        vocab.tokenize("ab\ud800")


@pytest.mark.parametrize("bad", [-1, 10**6, 2**70, True, 1.0, "1", None])
def test_what_is_no_token_is_refused(vocab: LlamaVocab, bad: object) -> None:
    with pytest.raises(InvalidRequestError, match="token ids are integers from 0 to") as caught:
        vocab.detokenize([1, bad])  # type: ignore[list-item]
    assert caught.value.param == "tokens"


def test_a_long_word_is_no_trouble_for_this_model(vocab: LlamaVocab) -> None:
    text = "a" * 200_000
    assert vocab.detokenize(vocab.tokenize(text)) == text.encode()


def test_many_threads_may_tokenize(vocab: LlamaVocab) -> None:
    texts = [f"thread {i} says {'hello ' * i}" for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(vocab.tokenize, texts)) == [vocab.tokenize(text) for text in texts]


def test_closing_waits_for_the_calls_that_run_and_refuses_more() -> None:
    backend = llama.load(Config(threads=1, ctx_size=256, parallel=1))
    vocab, in_use, leave = backend.vocab, threading.Event(), threading.Event()

    def use() -> None:
        with vocab.in_use():
            in_use.set()
            leave.wait(10)

    user = threading.Thread(target=use)
    closer = threading.Thread(target=backend.close)
    user.start()
    assert in_use.wait(10)
    closer.start()
    while vocab.handle is not None:  # the closer has the lock, or waits in it
        pass
    assert closer.is_alive()
    with pytest.raises(ServerClosingError):
        vocab.tokenize("too late")
    leave.set()
    closer.join(10)
    user.join(10)
    assert not closer.is_alive()
    with pytest.raises(ServerClosingError):
        vocab.detokenize([1])


# -- words that overrun the stack in std::regex


def test_only_tokenizers_with_std_regex_have_a_limit() -> None:
    assert _word_limit(2, {"tokenizer.ggml.pre": "qwen2"}) is None
    assert _word_limit(1, {}) is None
    assert _word_limit(2, {"tokenizer.ggml.pre": "tekken"}) is not None


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("a" * 10_000, True),
        ("a " * 10_000, False),
        (" " * 10_000, True),
        (" \u3000" * 5_000, True),
        ("_-" * 5_000, True),
        ("a\x1c" * 5_000, True),
        ("日本語 " * 5_000, False),
        ("x" * 1000 + "\n" + "x" * 1000, False),
    ],
)
def test_a_run_is_limited(text: str, refused: bool) -> None:
    limit = _word_limit(2, {"tokenizer.ggml.pre": "tekken"})
    assert limit is not None
    assert (limit.search(text) is not None) is refused


def test_a_refused_run_is_named(vocab: LlamaVocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab, "_too_long", _word_limit(2, {"tokenizer.ggml.pre": "tekken"}))
    with pytest.raises(InvalidRequestError, match="characters in a row, from character 3 on"):
        vocab.tokenize("hi " + "a" * 20_000)
