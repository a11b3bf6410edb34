"""Cohere's SDK: it ranks documents, and makes embeddings of every type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import PoolingType

from tests.programs.running import Ended, bin_of, environment_of, run
from tests.programs.table import Works
from tests.support.gguf_models import WIDTH, write_bert
from tests.support.http_server import serving
from trioserve.app import create_app
from trioserve.config import Config

pytestmark = pytest.mark.system

BEGIN = (
    "import cohere, json, os\nclient = cohere.ClientV2(base_url=os.environ['URL'], api_key='any')\n"
)
RANK = """
answer = client.rerank(
    model="m",
    query="cat",
    documents=["a cat", "dog " * 200, "the mat"],
    top_n=2,
    max_tokens_per_doc=16,
)
print(json.dumps([[one.index, one.relevance_score] for one in answer.results]))
try:
    client.rerank(model="m", query="cat", documents=["a"], max_tokens_per_doc=0)
except cohere.errors.BadRequestError as error:
    print(json.dumps(error.body["message"]))
"""
EMBED = """
types = ["float", "base64", "binary", "ubinary"]
made = client.embed(
    model="m", input_type="search_query", texts=["a cat", "dog"], embedding_types=types
).embeddings
print(json.dumps([made.float_, made.base64, made.binary, made.ubinary]))
"""


async def use(folder: Path, script: str, config: Config) -> list[Any]:
    """Run a script with the SDK against a server; returns the JSON that it prints."""
    python = bin_of("cohere") / "python"
    (folder / "use_cohere.py").write_text(BEGIN + script, encoding="utf-8")
    app = create_app(config)
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        environ = environment_of("cohere", home=folder, URL=url)
        ended: Ended = await run([str(python), "use_cohere.py"], folder=folder, environ=environ)
    assert ended.code == 0, ended.output
    assert ended.wanted == set()
    return [json.loads(line) for line in ended.output.splitlines() if line[:1] in '["']


async def test_the_sdk_ranks_documents(tmp_path: Path, works: Works) -> None:
    model = write_bert(tmp_path / "rank.gguf", pooling=PoolingType.RANK, labels=["fits"]).path
    ranked, refused = await use(tmp_path, RANK, Config(model=str(model), reranking=True, threads=1))
    scores = [score for _, score in ranked]
    assert len({index for index, _ in ranked}) == 2
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert refused.startswith("'max_tokens_per_doc' must be between")
    works("cohere", "rerank")


async def test_the_sdk_makes_embeddings(tmp_path: Path, works: Works) -> None:
    model = write_bert(tmp_path / "mean.gguf").path
    (made,) = await use(tmp_path, EMBED, Config(model=str(model), embeddings=True, threads=1))
    floats, packed, binary, ubinary = made
    assert [len(vector) for vector in floats] == [WIDTH, WIDTH]
    assert len(packed) == len(binary) == len(ubinary) == 2
    assert [[int(byte) + 128 for byte in one] for one in binary] == ubinary
    works("cohere", "embed")
