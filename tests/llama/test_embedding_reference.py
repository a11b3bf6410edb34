"""Vectors and scores beside those of llama-server, on the same files.

Runs where the variable LLAMA_SERVER names the binary:

    LLAMA_SERVER=/path/to/llama-server python -m pytest tests/llama/test_embedding_reference.py
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from gguf import PoolingType

from tests.support.gguf_models import write_bert, write_decoder
from tests.support.llama_server import llama_server
from tests.support.media_files import image_file
from tests.support.media_models import write_pair
from tests.support.served_model import served
from trioserve.chat.markers import media_marker
from trioserve.config.parse import parse

pytestmark = pytest.mark.system

TEXTS = ["the cat sits on the mat", "What is a panda?", "", "x1 y2 bear.", "ba du ce " * 15]
LONG = "bad ce " * 60  # more tokens than a batch of 64
#: Differences in rounding are not what is compared.
EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", "1", "-c", "512"]

Call = tuple[str, dict[str, Any]]

EMBED: list[Call] = [
    *(("/v1/embeddings", {"input": text or "a"}) for text in TEXTS),
    ("/v1/embeddings", {"input": ["the cat", "dog"], "model": "m"}),
    ("/v1/embeddings", {"input": [2, 5, 3]}),
    ("/v1/embeddings", {"input": [[2, 5, 3], ["the", 5]]}),
    ("/v1/embeddings", {"content": "the cat"}),
    *(("/embedding", {"content": "the cat", "embd_normalize": norm}) for norm in (-1, 0, 1, 2, 3)),
    ("/embeddings", {"input": ["the cat", "dog"]}),
    ("/v1/embeddings", {"input": {"prompt_string": "cat"}}),
    ("/v1/embeddings", {"input": [{"content": [{"type": "text", "text": "cat"}]}]}),
]
RANK: list[Call] = [
    *(("/v1/rerank", {"query": "cat", "documents": [text]}) for text in TEXTS),
    ("/v1/rerank", {"query": "cat", "documents": TEXTS[:3], "model": "m"}),
    ("/v1/rerank", {"query": "cat", "documents": TEXTS[:3], "top_n": 2}),
    ("/reranking", {"query": "", "texts": TEXTS[:3]}),
    ("/rerank", {"query": "cat", "texts": TEXTS[:2], "return_text": True}),
]

MODELS: dict[str, tuple[list[str], list[Call]]] = {
    "mean": (["--embedding"], EMBED),
    "cls": (["--embedding"], EMBED),
    "none": (["--embedding"], [call for call in EMBED if call[0] == "/embeddings"]),
    "last": (["--embedding", "-ub", "64"], [*EMBED, ("/v1/embeddings", {"input": LONG})]),
    "causal-mean": (["--embeddings"], EMBED),
    "rank": (["--rerank"], RANK),
    "judge": (
        ["--embedding", "--pooling", "rank", "-ub", "64"],
        [*RANK, ("/v1/rerank", {"query": "cat", "documents": [LONG]})],
    ),
}


def write(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    match name:
        case "mean":
            write_bert(path, context=128)
        case "cls":
            write_bert(path, context=128, pooling=PoolingType.CLS, seed=1)
        case "none":
            write_bert(path, context=128, pooling=None)
        case "rank":
            write_bert(path, context=128, pooling=PoolingType.RANK, labels=["relevant"], seed=2)
        case "last":
            write_decoder(path)
        case "causal-mean":
            write_decoder(path, pooling=PoolingType.MEAN)
        case _:
            write_decoder(
                path,
                pooling=PoolingType.RANK,
                labels=["yes", "no"],
                rerank_template="Q: {query}\nD: {document}\nA:",
            )
    return path


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """The same JSON, with numbers equal to 1e-4 of the largest there can be."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}/{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, value in enumerate(theirs):
            assert_same(ours[i], value, f"{where}/{i}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4), where
    elif where != "/model" or ours == "m":
        assert ours == theirs, where


def compare(flags: list[str], calls: list[Call]) -> None:
    """Send the calls to both servers, started with the same flags."""
    with llama_server(flags) as theirs, served(parse(flags, {}).config) as ours:
        for path, body in calls:
            answers = [client.post(path, json=body) for client in (ours.client, theirs)]
            assert [answer.status_code for answer in answers] == [200, 200], (path, body)
            assert_same(answers[0].json(), answers[1].json())


@pytest.mark.parametrize("name", MODELS)
def test_the_answers_are_the_same(tmp_path: Path, name: str) -> None:
    flags, calls = MODELS[name]
    compare(["-m", str(write(name, tmp_path)), *flags, *EXACT], calls)


@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "mlp", "qwen2vl"])
def test_the_answers_about_images_are_the_same(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pooling "last": llama-server pools nothing but the text after the last image."""
    marker = "<__media__>"
    monkeypatch.setenv("LLAMA_MEDIA_MARKER", marker)
    media_marker.cache_clear()
    pair = write_pair(tmp_path, kind)
    image = base64.b64encode(image_file(size=(70, 50))).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    own = {"prompt_string": f"a{marker}b{marker}", "multimodal_data": [image, image]}
    own["prompt_string"] += " c"  # it ends without an answer where there is no text at the end
    calls: list[Call] = [
        ("/embeddings", {"content": [own, "text"]}),
        ("/v1/embeddings", {"input": {"content": [{"type": "text", "text": "It is"}, url,
                                                  {"type": "text", "text": "."}]}}),
    ]  # fmt: skip
    try:
        compare([*pair.flags, "--embeddings", "--pooling", "last", *EXACT, "-c", "2048"], calls)
    finally:
        media_marker.cache_clear()
