"""Answers of a server on the vocabularies of many models, where they depend on the tokens.

Two small vocabularies are always there. Those of llama.cpp's sources are tested where these are:
see `tests.support.vocabularies`. The weights are random.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.support.grammar_bench import SCHEMAS, is_valid
from tests.support.sentence_pieces import write_sentence_pieces
from tests.support.served_model import ServedModel, served_model
from tests.support.vocabularies import (
    chat_templates,
    expected_tokens,
    vocabulary_files,
    write_model,
)

#: The kind of tokenizer, for each vocabulary of llama.cpp's sources that generates text.
GENERATING = {
    "aquila": "byte pairs",
    "baichuan": "SentencePiece",
    "command-r": "byte pairs",
    "deepseek-coder": "byte pairs",
    "deepseek-llm": "byte pairs",
    "falcon": "byte pairs",
    "gemma-4": "byte pairs with byte tokens",
    "gpt-2": "byte pairs",
    "gpt-neox": "byte pairs",
    "llama-bpe": "byte pairs",
    "llama-spm": "SentencePiece",
    "mpt": "byte pairs",
    "phi-3": "SentencePiece",
    "qwen2": "byte pairs",
    "qwen35": "byte pairs",
    "refact": "byte pairs",
    "starcoder": "byte pairs",
}
#: Those of models that only read.
ENCODERS = {"bert-bge": "WordPiece", "nomic-bert-moe": "unigrams"}
#: Those that llama.cpp's sources have no texts and tokens for.
WITHOUT_TEXTS = {"aquila", "baichuan", "gpt-neox", "nomic-bert-moe"}
SMALL: dict[str, dict[str, Any]] = {
    "small SentencePiece": {},
    "small SentencePiece without a space prefix": {"add_space_prefix": False},
}
ASK = [{"role": "user", "content": "What is the weather in \u00c5lesund? \U0001f98a"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Says how it is.",  # some templates take it for granted
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"description": "Where", "enum": ["\u00c5lesund", "Rome"]},
                    "days": {"description": "How many", "enum": [1, 2]},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_time")
]


#: For what is only tested where llama.cpp's sources are.
needs_the_sources = pytest.mark.needs("LLAMA_CPP_SDIST")


def of_the_sources(names: Iterable[str]) -> list[Any]:
    """Names of vocabularies, as parameters of tests."""
    return [pytest.param(name, marks=needs_the_sources) for name in names]


def model_file(name: str, folder: Path) -> Path:
    """Write a model with this vocabulary."""
    path = folder / "model.gguf"
    if name in SMALL:
        return write_sentence_pieces(path, **SMALL[name])
    return write_model(vocabulary_files()[name], path)


@pytest.fixture(scope="module", params=[*SMALL, *of_the_sources(GENERATING)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    path = model_file(request.param, tmp_path_factory.mktemp("models"))
    try:
        # Outputs are compared to the token: each must find the KV cache as empty as the others.
        with served_model(path, parallel=1, kv_unified=False, cache_prompt=False) as served:
            yield served
    finally:
        path.unlink()  # they are large


def drawn(seed: int = 1, **fields: Any) -> dict[str, Any]:
    """A request whose output is the same each time."""
    return {"seed": seed, "temperature": 1.3, "cache_prompt": False, **fields}


def complete(served: ServedModel, seed: int = 1, **fields: Any) -> dict[str, Any]:
    """Continue a prompt."""
    answer = served.post("/completion", drawn(seed, prompt="Hi, the", **fields))
    assert isinstance(answer, dict)
    return answer


@needs_the_sources
def test_every_vocabulary_is_here() -> None:
    assert set(vocabulary_files()) == {*GENERATING, *ENCODERS}


# -- structured output


CONSTANTS: list[Any] = [
    *("42", 42, -0.5, None, "", " the"),
    '\u00dcn\u00ef \U0001f98a\n\t"\\ x',
    "<s>[INST] </s><|im_end|><0x0A>",
    "\u2581x",
    {"a": [1, {"b c": "the the"}]},
]


def test_constants(served: ServedModel) -> None:
    for value in CONSTANTS:
        answer = complete(served, json_schema={"const": value}, n_predict=300)
        assert json.loads(answer["content"]) == value
        assert answer["stop_type"] == "eos", value


GRAMMARS = [
    ('root ::= "a"{5,5}', "aaaaa"),
    ('root ::= " x" | "  the" | "\\n\\n"', " x|  the|\n\n"),
    ('root ::= [\u0430-\u044f]{3} "\u00e9\U0001f98a"', "[\u0430-\u044f]{3}\u00e9\U0001f98a"),
    ('root ::= "\u2581" "<s></s>" "<0x0A>"', "\u2581<s></s><0x0A>"),
    ('root ::= ("yes" | "no") ("\\n" [^a-z\\n]{2})?', "(yes|no)(\n[^a-z\n]{2})?"),
]


@pytest.mark.system
def test_grammars_and_schemas(served: ServedModel) -> None:
    for grammar, pattern in GRAMMARS:
        for seed in range(2):
            answer = complete(served, seed, grammar=grammar, n_predict=60)
            assert re.fullmatch(pattern, answer["content"]), answer["content"]
            assert answer["stop_type"] == "eos"
    for name in ("array", "integer", "nested", "object", "pattern"):
        answer = complete(served, json_schema=SCHEMAS[name], n_predict=500)
        assert is_valid(json.loads(answer["content"]), SCHEMAS[name]), name


def test_enums(served: ServedModel) -> None:
    values = ["red", "gr\u00fcn", "\U0001f98a\U0001f98a", "a b", " a", "a\nb", 3, None]
    for seed in range(3):
        answer = complete(served, seed, json_schema={"enum": values}, n_predict=60)
        assert json.loads(answer["content"]) in values


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}]
)
def test_forced_tool_calls(served: ServedModel, choice: Any) -> None:
    body = drawn(
        messages=ASK,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning_budget_tokens=8,  # of Gemma 4
        max_tokens=400,
    )
    [answer] = served.post("/v1/chat/completions", body)["choices"]
    assert answer["finish_reason"] == "tool_calls"
    [call] = answer["message"]["tool_calls"]
    allowed = {"get_time"} if choice != "required" else {"get_time", "get_weather"}
    assert call["function"]["name"] in allowed
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("\u00c5lesund", "Rome") and arguments["days"] in (1, 2)

    deltas = deltas_of(served, body)
    [name] = [c["function"]["name"] for d in deltas for c in d.get("tool_calls", ()) if "id" in c]
    parts = [c["function"].get("arguments", "") for d in deltas for c in d.get("tool_calls", ())]
    assert name == call["function"]["name"]
    assert "".join(parts) == call["function"]["arguments"]


@needs_the_sources
def test_forced_tool_calls_with_every_template(tmp_path: Path) -> None:
    """The markers of calls are text here, and what a grammar forces is full of them."""
    templates = chat_templates()
    path = write_sentence_pieces(tmp_path / "model.gguf", context=8192)
    body = drawn(
        messages=ASK,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_budget_tokens=4,
    )
    for name in sorted(templates):
        template = templates[name].read_text(encoding="utf-8")
        with served_model(path, parallel=1, ctx_size=8192, chat_template=template) as served:
            [answer] = served.post("/v1/chat/completions", body)["choices"]
        assert answer["finish_reason"] == "tool_calls", name
        [call] = answer["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in ("\u00c5lesund", "Rome") and arguments["days"] in (1, 2), name


@needs_the_sources
def test_with_thinking_off_every_template_answers_at_once(tmp_path: Path) -> None:
    """Random weights never close reasoning: an answer must not wait for that."""
    templates = chat_templates()
    path = write_sentence_pieces(tmp_path / "model.gguf", context=8192)
    off = drawn(messages=ASK, max_tokens=60, enable_thinking=False)
    calls = {"tools": TOOLS, "tool_choice": "required"}
    for name in sorted(templates):
        template = templates[name].read_text(encoding="utf-8")
        with served_model(path, parallel=1, ctx_size=8192, chat_template=template) as served:
            for fields in (
                {"guided_choice": ["yes", "no"]},
                {"guided_json": {"enum": [1, 2]}},
                calls,
            ):
                [choice] = served.post("/v1/chat/completions", off | fields)["choices"]
                message = choice["message"]
                assert "reasoning_content" not in message, name
                assert message["content"] or message["tool_calls"], name


def deltas_of(served: ServedModel, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask for a stream of a chat, and return what each event adds."""
    events = served.stream("/v1/chat/completions", body)
    return [choice["delta"] for event in events for choice in event["choices"]]


# -- text


def test_a_stream_is_the_whole(served: ServedModel) -> None:
    fields = drawn(prompt="Hi, the", n_predict=40, ignore_eos=True)
    whole = served.post("/completion", fields)
    events = served.stream("/completion", fields)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == complete(
        served, n_predict=40, ignore_eos=True, return_tokens=True
    )["tokens"]

    body = drawn(messages=ASK, max_tokens=40, ignore_eos=True)
    [answer] = served.post("/v1/chat/completions", body)["choices"]
    deltas = deltas_of(served, body)
    assert "".join(delta.get("content") or "" for delta in deltas) == answer["message"]["content"]


def test_the_text_is_that_of_the_tokens(served: ServedModel) -> None:
    answer = complete(served, n_predict=40, ignore_eos=True, return_tokens=True)
    data = b"".join(served.vocab.pieces[token] for token in answer["tokens"])
    assert answer["content"] == data.decode(errors="replace")


def test_logprobs_have_the_bytes_of_tokens(served: ServedModel) -> None:
    body = drawn(messages=ASK, max_tokens=30, ignore_eos=True, logprobs=True, top_logprobs=3)
    [answer] = served.post("/v1/chat/completions", body)["choices"]
    entries = answer["logprobs"]["content"]
    assert len(entries) == 30
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode(errors="replace") == answer["message"]["content"]
    for entry in entries:
        for one in (entry, *entry["top_logprobs"]):
            assert bytes(one["bytes"]) == served.vocab.pieces[one["id"]]

    events = served.stream("/v1/chat/completions", body)
    choices = [choice for event in events for choice in event["choices"]]
    parts = [part for c in choices if c.get("logprobs") for part in c["logprobs"]["content"]]
    assert [(p["id"], p["bytes"]) for p in parts] == [(e["id"], e["bytes"]) for e in entries]


def test_stop_strings_over_the_borders_of_tokens(served: ServedModel) -> None:
    # The grammar allows any text but line breaks: every byte is a part of a character.
    fields = {"n_predict": 40, "grammar": "root ::= [^\\x00-\\x1F]+", "ignore_eos": True}
    free = complete(served, return_tokens=True, **fields)
    text, data = free["content"], free["content"].rstrip("\ufffd").encode()
    stops = []
    for end in accumulate(len(served.vocab.pieces[token]) for token in free["tokens"]):
        before, after = data[:end].decode(errors="ignore"), data[end:].decode(errors="ignore")
        if len(before) > 1 and len(after) > 1:
            stops.append(text[len(before) - 2 : len(before) + 2])
    assert len(stops) > 20
    for stop in stops[::10]:
        answer = complete(served, **fields, stop=[stop])
        assert answer["content"] == text[: text.index(stop)]
        assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)
        events = served.stream("/completion", drawn(prompt="Hi, the", **fields, stop=[stop]))
        assert "".join(event["content"] for event in events) == answer["content"]


def test_echo(served: ServedModel) -> None:
    for prompt in ("Hi, the", " \u00fc \U0001f98a\n", "  x"):
        fields = drawn(prompt=prompt, max_tokens=8, ignore_eos=True)
        [plain] = served.post("/v1/completions", fields)["choices"]
        [echoed] = served.post("/v1/completions", {**fields, "echo": True})["choices"]
        assert echoed["text"] == prompt + plain["text"]
        events = served.stream("/v1/completions", {**fields, "echo": True})
        texts = [choice["text"] for event in events for choice in event["choices"]]
        assert "".join(texts) == echoed["text"]


# -- tokens


TEXTS = ["the 42", "  x\n\n\ty", "\u00fc\U0001f98a \u4f60\u597d\u0416", "a</s>b<|im_end|>", "\0"]


def test_text_and_tokens(served: ServedModel) -> None:
    for text in TEXTS:
        fragment = served.vocab.tokenize(text, parse_special=False, is_fragment=True)
        assert served.vocab.detokenize(fragment) == text.encode()
        body = {"content": text, "add_special": False, "parse_special": False}
        tokens = served.post("/tokenize", body)["tokens"]
        assert tokens == list(served.vocab.tokenize(text, parse_special=False))
        again = served.post("/detokenize", {"tokens": tokens})["content"]
        assert again in (text, " " + text)


@needs_the_sources
@pytest.mark.parametrize("name", sorted({*GENERATING, *ENCODERS} - WITHOUT_TEXTS))
def test_tokens_are_those_that_llama_cpp_expects(name: str, tmp_path: Path) -> None:
    path = model_file(name, tmp_path)
    expected = expected_tokens(vocabulary_files()[name])
    assert len(expected) > 30
    with served_model(path, embeddings=name in ENCODERS) as served:
        for text, tokens in expected:
            assert list(served.vocab.tokenize(text, parse_special=False)) == tokens, text
    path.unlink()


@needs_the_sources
@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings(name: str, tmp_path: Path) -> None:
    texts = ["The cat sits.", "the cat sits", "\u4f60\u597d \U0001f98a"]
    with served_model(model_file(name, tmp_path), embeddings=True) as served:
        data = served.post("/v1/embeddings", {"input": texts})["data"]
        vectors = [each["embedding"] for each in data]
        assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0] * 3)
        [again] = served.post("/v1/embeddings", {"input": texts[2]})["data"]
        assert again["embedding"] == pytest.approx(vectors[2], abs=1e-5)
        error = served.post("/completion", {"prompt": "x"}, status=501)["error"]
        assert error["message"]
