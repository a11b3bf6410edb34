"""vLLM's routes that score and classify texts, and tell of the tokenizer."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gguf import PoolingType

from tests.support.clients import client_of, client_of_app, error_body
from tests.support.gguf_models import write_bert
from tests.support.plain_loop import plain_embeddings
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.testing import ScriptedBackend

DOCUMENTS = ["a cat", "dog", "the mat"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LABELS = ["calm", "glad", "sad"]
#: Tolerance of rounding.
CLOSE = 1e-4


def opened(path: Path, **config: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return client_of_app(create_app(Config(model=str(path), threads=1, **config)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ranker(folder: Path) -> Path:
    path = folder / "rank.gguf"
    return write_bert(path, pooling=PoolingType.RANK, labels=["relevant"], seed=2).path


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Path:
    return write_bert(folder / "classes.gguf", pooling=PoolingType.RANK, labels=LABELS, seed=3).path


@pytest.fixture
async def ranking(ranker: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with opened(ranker, reranking=True) as client:
        yield client


@pytest.fixture
async def classifying(classifier: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with opened(classifier, reranking=True) as client:
        yield client


def logistic(score: float) -> float:
    return 1 / (1 + math.exp(-score))


async def raw_scores(client: httpx.AsyncClient, query: str, texts: Sequence[str]) -> list[float]:
    answer = await client.post("/v1/rerank", json={"query": query, "documents": texts})
    ranked = sorted(answer.json()["results"], key=lambda one: one["index"])
    return [one["relevance_score"] for one in ranked]


# -- scores


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
async def test_a_reranker_scores_documents(
    ranking: httpx.AsyncClient, path: str, first: str, second: str
) -> None:
    answer = await ranking.post(path, json={"model": "m", first: "cat", second: DOCUMENTS})
    written = answer.json()
    assert answer.status_code == 200
    assert written.pop("id").startswith("score-")
    assert written.pop("created") > 0
    data = written.pop("data")
    assert written == {
        "object": "list",
        "model": "rank.gguf",
        "usage": {
            "prompt_tokens": 20,
            "total_tokens": 20,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
    expected = [logistic(score) for score in await raw_scores(ranking, "cat", DOCUMENTS)]
    assert [one["score"] for one in data] == pytest.approx(expected, abs=CLOSE)
    assert [(one["index"], one["object"]) for one in data] == [(i, "score") for i in range(3)]


async def test_pairs_and_scores_without_an_activation(ranking: httpx.AsyncClient) -> None:
    queries = ["cat", "dog", "what is a mat"]
    body = {"text_1": queries, "text_2": DOCUMENTS, "use_activation": False}
    data = (await ranking.post("/v1/score", json=body)).json()["data"]
    expected = [
        (await raw_scores(ranking, query, [text]))[0]
        for query, text in zip(queries, DOCUMENTS, strict=True)
    ]
    assert [one["score"] for one in data] == pytest.approx(expected, abs=CLOSE)
    single = (await ranking.post("/v1/score", json={"text_1": "cat", "text_2": "dog"})).json()
    assert len(single["data"]) == 1


async def test_an_embedding_model_scores_by_the_cosine(folder: Path) -> None:
    path = write_bert(folder / "mean.gguf").path
    async with opened(path, embeddings=True) as client:
        body = {"text_1": "a cat", "text_2": DOCUMENTS}
        scored = (await client.post("/v1/score", json=body)).json()
        texts = ["a cat", *DOCUMENTS]
        made = (await client.post("/v1/embeddings", json={"input": texts})).json()
        refused = await client.post("/v1/score", json=body | {"use_activation": False})
    query, *others = [np.array(one["embedding"]) for one in made["data"]]
    scores = [one["score"] for one in scored["data"]]
    assert scores == pytest.approx([float(query @ other) for other in others], abs=CLOSE)
    assert scores[0] == pytest.approx(1, abs=CLOSE)
    assert scored["usage"]["prompt_tokens"] == made["usage"]["prompt_tokens"]
    message = "'use_activation' must be true: an embedding model gives cosines."
    assert (refused.status_code, refused.json()) == (400, error_body(message, "use_activation"))


# -- classes


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_the_class_of_each_text(
    classifying: httpx.AsyncClient, classifier: Path, path: str
) -> None:
    texts = ["the cat sits", "a dog runs on the mat", "what is a panda?"]
    answer = await classifying.post(path, json={"input": texts})
    assert answer.status_code == 200
    tokens = [
        (await classifying.post("/tokenize", json={"prompt": text})).json()["tokens"]
        for text in texts
    ]
    exact = plain_embeddings(classifier, tokens, pooling=4, width=len(LABELS))
    written = answer.json()
    assert written["id"].startswith("classify-") and written["object"] == "list"
    assert written["usage"]["prompt_tokens"] == sum(map(len, tokens))
    for i, (one, scores) in enumerate(zip(written["data"], exact, strict=True)):
        powers = np.exp(scores - scores.max())
        assert one["probs"] == pytest.approx((powers / powers.sum()).tolist(), abs=1e-3)
        assert one["label"] == LABELS[int(scores.argmax())]
        assert (one["index"], one["num_classes"]) == (i, len(LABELS))
    body = {"input": tokens, "use_activation": False}
    raw = (await classifying.post(path, json=body)).json()["data"]
    for one, scores in zip(raw, exact, strict=True):
        assert one["probs"] == pytest.approx(scores.tolist(), abs=1e-2)


async def test_a_single_class_has_the_logistic_function(ranking: httpx.AsyncClient) -> None:
    body = {"input": "the cat"}
    (one,) = (await ranking.post("/v1/classify", json=body)).json()["data"]
    (raw,) = (await ranking.post("/v1/classify", json=body | {"activation": False})).json()["data"]
    assert one["probs"] == pytest.approx([logistic(raw["probs"][0])], abs=CLOSE)
    assert (one["label"], one["num_classes"]) == ("relevant", 1)


# -- what is refused


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("/v1/score", {"text_2": "a"}, "text_1", "is required."),
        ("/v1/score", {"text_1": "a"}, "text_2", "is required."),
        (
            "/v1/score",
            {"text_1": "a", "text_2": []},
            "text_2",
            "must be a string, or a list of strings, and not empty.",
        ),
        (
            "/v1/score",
            {"queries": ["a", 1], "documents": ["a", "b"]},
            "queries",
            "must be a string, or a list of strings, and not empty.",
        ),
        (
            "/v1/score",
            {"text_1": ["a", "b"], "text_2": "c"},
            "text_1",
            "must have one text, or as many as 'text_2': one for each of them.",
        ),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "use_activation": "no"},
            "use_activation",
            "must be true or false.",
        ),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "must be -1 or a positive integer.",
        ),
        ("/v1/classify", {}, "input", "is required."),
        ("/v1/classify", {"input": []}, "input", "must be a string or a list, and not empty."),
        (
            "/v1/classify",
            {"input": 5},
            "input",
            "must be a string, a list of token ids, or a list of these.",
        ),
        (
            "/v1/classify",
            {"input": [[1, "a"]]},
            "input",
            "must be a string, a list of token ids, or a list of these.",
        ),
        (
            "/v1/classify",
            {"input": "a", "add_special_tokens": False},
            "add_special_tokens",
            "is not supported with this value; leave it out.",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    ranking: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, problem: str
) -> None:
    answer = await ranking.post(path, json=body)
    assert (answer.status_code, answer.json()) == (400, error_body(f"'{param}' {problem}", param))


async def test_texts_that_are_too_long_are_named(ranking: httpx.AsyncClient) -> None:
    for path, body, param in (
        ("/v1/score", {"text_1": "cat", "text_2": ["mat", "cat " * 80]}, "text_2[1]"),
        ("/v1/classify", {"input": ["mat", "cat " * 80]}, "input[1]"),
        ("/v1/score", {"text_1": "cat", "text_2": "a", "priority": 200}, "priority"),
    ):
        answer = await ranking.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_texts_that_are_cut(ranking: httpx.AsyncClient) -> None:
    for path, body, n_tokens in (
        ("/v1/score", {"text_1": "cat", "text_2": ["mat " * 80, "mat"]}, 64 + 6),
        ("/v1/classify", {"input": ["mat " * 80, [5] * 80]}, 64 + 64),
    ):
        assert (await ranking.post(path, json=body)).status_code == 400
        answer = await ranking.post(path, json={**body, "truncate_prompt_tokens": -1})
        assert answer.json()["usage"]["prompt_tokens"] == n_tokens


async def test_texts_that_are_too_long_for_a_cosine_are_named(folder: Path) -> None:
    long = "cat " * 80
    async with opened(write_bert(folder / "mean.gguf").path, embeddings=True) as client:
        for first, second, param in (
            (long, "a", "text_1"),
            ("a", long, "text_2"),
            (["a", long], ["a", "b"], "text_1[1]"),
            (["a", "b"], ["a", long], "text_2[1]"),
        ):
            answer = await client.post("/v1/score", json={"text_1": first, "text_2": second})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(f"'{param}' is too large")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_a_model_with_several_classes_has_no_score(
    classifying: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await classifying.post(path, json=body)
    assert answer.status_code == 501
    message = answer.json().get("message") or answer.json()["error"]["message"]
    assert message == (
        "This model has 3 classes, and none of them is a score: ask `/v1/classify` for their "
        "probabilities"
    )


async def test_servers_that_cannot(folder: Path) -> None:
    async with opened(write_bert(folder / "plain.gguf").path, embeddings=True) as client:
        answer = await client.post("/v1/classify", json={"input": "a"})
        assert answer.status_code == 501
        assert "classification head" in answer.json()["error"]["message"]
    async with client_of(ScriptedBackend()) as client:
        for path, what in (("/v1/score", "score"), ("/v1/classify", "classify")):
            answer = await client.post(path, json={})
            assert answer.status_code == 501
            assert f"does not {what} texts" in answer.json()["error"]["message"]


# -- the tokenizer


async def test_the_tokenizer() -> None:
    async with client_of_app(create_app(Config(threads=1, ctx_size=512))) as client:
        info = (await client.get("/tokenizer_info")).json()
        plain = (await client.post("/tokenize", json={"content": "Hi there"})).json()
        vllm = (await client.post("/tokenize", json={"prompt": "Hi there"})).json()
        body = {"prompt": "Hi there", "add_special_tokens": False, "with_pieces": True}
        bare = (await client.post("/tokenize", json=body)).json()
        wrong = await client.post("/tokenize", json={"prompt": 5})
        named = (
            await client.post("/tokenize", json={"prompt": "Hi there", "return_token_strs": True})
        ).json()
        text = (await client.post("/detokenize", json={"tokens": plain["tokens"]})).json()
    assert info["chat_template"] and info["eos_token"]
    assert info["model_max_length"] == 512
    assert plain.keys() == {"tokens"}
    assert (vllm["count"], vllm["max_model_len"]) == (len(vllm["tokens"]), 512)
    assert [one["id"] for one in bare["tokens"]] == plain["tokens"]
    assert vllm["tokens"][-len(plain["tokens"]) :] == plain["tokens"]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
    assert (named.pop("token_strs"), named) == (["Hi", " there"], vllm)
    assert text == {"content": "Hi there", "prompt": "Hi there"}


async def test_the_tokens_of_a_chat() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with client_of_app(create_app(Config(threads=1, ctx_size=512))) as client:
        chat = {"messages": messages, "tools": TOOLS, "add_generation_prompt": False}
        for body in ({"messages": messages}, chat):
            prompt = (await client.post("/apply-template", json=body)).json()["prompt"]
            expected = (await client.post("/tokenize", json={"prompt": prompt})).json()
            assert (await client.post("/tokenize", json=body)).json() == expected
        count = (await client.post("/v1/chat/completions/input_tokens", json=chat)).json()
        assert count["input_tokens"] == expected["count"] > 0
        for more, param in (
            ({"prompt": "a"}, "messages"),
            ({"add_special_tokens": True}, "add_special_tokens"),
            ({"messages": []}, "messages"),
        ):
            answer = await client.post("/tokenize", json=chat | more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
