from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.gguf_maker import byte_symbols
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import library, vocab as vocab_module
from trioserve.llama.library import lib
from trioserve.llama.vocab import LlamaVocab, TextParts

_NORMAL, _CONTROL, _USER = (
    int(gguf.TokenType.NORMAL),
    int(gguf.TokenType.CONTROL),
    int(gguf.TokenType.USER_DEFINED),
)
_BYTE = int(gguf.TokenType.BYTE)

#: These overlap each other and themselves, hold each other, and begin or end with blanks.
SPECIALS = (
    "<s>",
    "<|user|>",
    "<|user|>x",
    "  ",
    "    ",
    "\n\n",
    ">a",
    "aab",
    "abaa",
    "xx1",
    "1xx",
    "<z",
    "é\n",
)
LETTERS = (*SPECIALS, " ", "a", "b", "x", "1", "\n", "\t", "\0", "é", "😀", "▁", ">", "|", "user")
texts = st.lists(st.sampled_from(LETTERS), max_size=30).map("".join)


def write_vocab(path: Path, model: str, *, name: str = "tiny", bytes_: int = 256) -> Path:
    """Write a file without weights. A SentencePiece "phi-3" takes away blanks after specials."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    writer.add_tokenizer_model(model)
    if model == "llama":
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(bytes_))]
        types = [int(gguf.TokenType.UNKNOWN), *[_BYTE] * bytes_]
        words = ["▁", "a", "b", "x", "▁a", "ab", "aa", "▁x", "us", "e", "r", "er", "user"]
        writer.add_token_scores(
            [0.0] * (1 + bytes_)
            + [-float(i) for i in range(len(words))]
            + [0.0] * (len(SPECIALS) + 2)
        )
    else:
        tokens, words = byte_symbols(), ["Ġa", "ab", "ĊĊ", "us", "er"]
        types = [_NORMAL] * len(tokens)
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["Ġ a", "a b", "Ċ Ċ", "u s", "e r"])
    specials = [*SPECIALS, "</s>", "<|endoftext|>"]
    tokens += [*words, *specials]
    types += [_NORMAL] * len(words)
    types += [_CONTROL if text[0] == "<" else _USER for text in specials]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<s>"))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_vocab(path: Path) -> tuple[LlamaVocab, object]:
    library.start()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    assert model is not None
    try:
        return LlamaVocab(lib.llama_model_get_vocab(model), {"tokenizer.ggml.pre": "gpt-2"}), model
    except BaseException:
        lib.llama_model_free(model)
        raise


@pytest.fixture(scope="module", params=["gpt2", "llama", "phi-3", "bundled"])
def vocab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaVocab]:
    if request.param == "bundled":
        with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
            yield backend.vocab
        return
    kind = "gpt2" if request.param == "gpt2" else "llama"
    path = tmp_path_factory.mktemp("vocab") / "vocab.gguf"
    made, model = open_vocab(write_vocab(path, kind, name=request.param))
    yield made
    made.close()
    lib.llama_model_free(model)


def whole(vocab: LlamaVocab, text: str, **flags: bool) -> tuple[int, ...]:
    """Tokenize a text that is not cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_module, "CUT_FROM", len(text))
        return vocab.tokenize(text, **flags)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=texts, size=st.integers(1, 6), add=st.booleans(), parse=st.booleans())
def test_parts_have_the_tokens_of_the_whole(
    vocab: LlamaVocab, text: str, size: int, add: bool, parse: bool
) -> None:
    expected = whole(vocab, text, add_special=add, parse_special=parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_module, "MAX_SPECIALS", 1 + size // 3)
        patch.setattr(vocab_module, "MAX_CHARS", size)
        patch.setattr(vocab_module, "CUT_FROM", 0)
        assert vocab.tokenize(text, add_special=add, parse_special=parse) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(names=st.sets(st.text("ab <", min_size=1, max_size=4), max_size=8), text=st.text("ab <"))
def test_places_are_those_between_what_llama_cpp_finds(names: set[str], text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_module, "MAX_SPECIALS", 1)
        parts = [part.text for part in TextParts(names).split(text)]
    assert "".join(parts) == text
    assert [found for part in parts for found in partition(part, names)] == partition(text, names)


def partition(text: str, names: set[str]) -> list[str]:
    """Do what llama.cpp does: the longest names first, each from the left."""
    found = [(text, False)] if text else []
    for name in sorted(names, key=lambda name: (-len(name), name)):
        cut = [
            re.split(f"({re.escape(name)})", part) if not done else [part] for part, done in found
        ]
        found = [
            (piece, done or piece == name)
            for pieces, (_, done) in zip(cut, found, strict=True)
            for piece in pieces
            if piece
        ]
    return [part for part, _ in found]


@pytest.mark.parametrize("unit", ["<|im_start|>\n", "<s> ", "    ", "aaba", "😀"])
def test_the_time_does_not_explode(vocab: LlamaVocab, unit: str) -> None:
    text = unit * (100_000 // len(unit))
    start = time.thread_time()
    vocab.tokenize(text)
    assert time.thread_time() - start < 2  # 0.05 to 0.3; uncut 1 to 15


def test_work_that_nobody_waits_for_is_given_up(vocab: LlamaVocab) -> None:
    answers = iter([False, False])
    with pytest.raises(StopIteration):
        vocab.tokenize("<s><|im_start|>" * 10_000, check=lambda _: next(answers))


def test_short_text_is_not_cut(vocab: LlamaVocab) -> None:
    def check(n_tokens: int) -> None:
        raise AssertionError("asked")

    vocab.tokenize("<s>" * 1000, check=check)


def test_names_too_much_alike_are_refused() -> None:
    with pytest.raises(RecursionError):
        TextParts({"a" * n for n in range(1, 2000)})


def test_sentence_piece_needs_all_bytes(tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "vocab.gguf", "llama", bytes_=200)
    with pytest.raises(ModelLoadError, match="no token for the byte 0xC8"):
        open_vocab(path)
