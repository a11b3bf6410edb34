"""Text with a gap: `/infill`, and `suffix` of `/v1/completions`."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.support import fim_model
from tests.support.clients import client_of, use_openai
from trioserve.config import Config
from trioserve.llama import load
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import ByteVocab
from trioserve.types import FimTokens

PRE, SUF, MID, REP, SEP = "\x01\x02\x03\x04\x05"


class GapVocab(ByteVocab):
    fim = FimTokens(prefix=1, suffix=2, middle=3)


class RepositoryVocab(ByteVocab):
    fim = FimTokens(prefix=1, suffix=2, middle=3, repository=4, file=5)


class Prompts(list[str]):
    """The prompts that a script has seen."""

    def __call__(self, prompt: str) -> str:
        self.append(prompt)
        return "gap"


def gap_client(
    prompts: Prompts, vocab: ByteVocab | None = None, **config: Any
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    backend = ScriptedBackend(prompts, n_ctx=400)
    backend.vocab = vocab or GapVocab()
    return client_of(backend, **config)


async def filled(body: dict[str, Any], vocab: ByteVocab | None = None, **settings: Any) -> str:
    """The prompt that a request makes."""
    prompts = Prompts()
    async with gap_client(prompts, vocab, **settings) as client:
        answer = await client.post("/infill", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == "gap"
    return prompts[-1]


async def test_the_parts_stand_between_their_tokens() -> None:
    body = {"input_prefix": "a", "input_suffix": "b"}
    assert await filled(body) == f"{PRE}a{SUF}b{MID}"
    assert await filled(body | {"prompt": "x"}) == f"{PRE}ax{SUF}b{MID}"
    assert await filled(body | {"input_prefix": ["a", 65]}) == f"{PRE}aA{SUF}b{MID}"
    assert await filled(body, spm_infill=True) == f"{SUF}b{PRE}a{MID}"


async def test_extra_files() -> None:
    extra = [{"filename": "a.py", "text": "A\n"}, {"text": "B\n"}]
    body = {"input_prefix": "a", "input_suffix": "b", "input_extra": extra}
    gap = f"{PRE}a{SUF}b{MID}"
    files = "\n\n--- snippet ---\n\nA\n\n\n--- snippet ---\n\nB\n"
    assert await filled(body) == files + gap
    files = f"{REP}myproject\n{SEP}a.py\nA\n{SEP}tmp\nB\n{SEP}filename\n"
    assert await filled(body, RepositoryVocab()) == files + gap


async def test_long_prefixes_and_suffixes_are_cut_away_from_the_gap() -> None:
    body = {
        "input_prefix": "a" * 100 + "A" * 60,
        "input_suffix": "B" * 18 + "b" * 100,
        "input_extra": [{"text": "c" * 500}],
        "n_predict": 5,
    }
    prompt = await filled(body, batch_size=80)
    gap = f"{PRE}{'A' * 60}{SUF}{'B' * 18}{MID}"
    assert prompt == "c" * (400 - 80 - 10) + gap


async def test_a_stream_and_copies() -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "n_cmpl": 2, "stream": True}
    async with gap_client(Prompts()) as client:
        answer = await client.post("/infill", json=body)
    events = [json.loads(each.removeprefix("data: ")) for each in answer.text.split("\n\n") if each]
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["index"]] += event["content"]
    assert texts == {0: "gap", 1: "gap"}
    assert sum(event["stop"] for event in events) == 2


async def test_bad_requests_name_the_field() -> None:
    async with gap_client(Prompts()) as client:
        for fields, param in (
            ({"input_prefix": None}, "input_prefix"),
            ({"input_extra": [{"filename": "a"}]}, "input_extra"),
            ({"input_extra": [{"text": "a", "filename": 5}]}, "input_extra"),
            ({"input_prefix": [999]}, "input_prefix"),
            ({"suffix": "b"}, "suffix"),
        ):
            body = {"input_prefix": "a", "input_suffix": "b"} | fields
            answer = await client.post("/infill", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_vocabulary_without_the_tokens() -> None:
    async with gap_client(Prompts(), ByteVocab()) as client:
        answer = await client.post("/infill", json={})
    assert answer.status_code == 501
    assert answer.json()["error"] == {
        "code": 501,
        "message": "Infill is not supported by this model: prefix token is missing. "
        "suffix token is missing. middle token is missing.",
        "type": "not_supported_error",
        "param": None,
    }


async def test_openai_s_suffix() -> None:
    prompts = Prompts()
    backend = ScriptedBackend(prompts)
    backend.vocab = GapVocab()

    def use(client: openai.OpenAI) -> None:
        answer = client.completions.create(model="m", prompt=["a", "c"], suffix="b")
        assert [choice.text for choice in answer.choices] == ["gap", "gap"]

    await use_openai(backend, use)
    assert sorted(prompts) == [f"{PRE}a{SUF}b{MID}", f"{PRE}c{SUF}b{MID}"]


def test_llama_cpp_tells_the_tokens(tmp_path: Path) -> None:
    path = tmp_path / "fim.gguf"
    fim_model.write(path)
    backend = load(Config(model=str(path), ctx_size=64))
    try:
        assert backend.vocab.fim == fim_model.TOKENS
    finally:
        backend.close()
