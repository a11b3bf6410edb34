"""Tokens and forced outputs beside those of llama-server, on the vocabularies of many models.

Runs where `LLAMA_SERVER` names the binary; `LLAMA_CPP_SDIST` names llama.cpp's sources, without
which the small vocabularies are compared alone:

    LLAMA_SERVER=/path/to/llama-server python -m pytest tests/api/test_vocabularies_reference.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.test_vocabularies import GENERATING, SMALL, model_file, of_the_sources
from tests.support.llama_server import llama_server
from tests.support.served_model import ServedModel, served_model

pytestmark = pytest.mark.system

TEXTS = [
    "Hi, the cat",
    " two  spaces ",
    '\u00dcn\u00ef \U0001f98a\n\t"\\ x',
    "<s>[INST] </s><|im_end|><0x0A>",
    "1234567 x\u0301\u200b  \r\n",
    "",
]
#: Grammars that leave one output, so that weights do not matter.
FORCED: list[dict[str, Any]] = [
    {"json_schema": {"const": "42"}},
    {"json_schema": {"const": True}},
    {"grammar": 'root ::= "a"{5,5}'},
    {"grammar": 'root ::= " the" "  cat\\n" [x] "\\u00dc"'},
    {"grammar": 'root ::= "\\U0001F98A" "!"'},
]


def reference(path: Path) -> AbstractContextManager[httpx.Client]:
    """Run llama-server on a model file."""
    return llama_server(["-m", str(path), "-t", "1", "-c", "2048", "-np", "1"])


Both = tuple[ServedModel, httpx.Client]


@pytest.fixture(scope="module", params=[*SMALL, *of_the_sources(GENERATING)])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    path = model_file(request.param, tmp_path_factory.mktemp("models"))
    try:
        with served_model(path, parallel=1) as ours, reference(path) as theirs:
            yield ours, theirs
    finally:
        path.unlink()  # they are large


def answers(both: Both, route: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """Ask both the same."""
    ours, theirs = both
    answer = theirs.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return ours.post(route, body), answer.json()


def test_tokens(both: Both) -> None:
    for text, add_special, parse_special in product(TEXTS, (False, True), (False, True)):
        body = {
            "content": text,
            "add_special": add_special,
            "parse_special": parse_special,
            "with_pieces": True,
        }
        our, their = answers(both, "/tokenize", body)
        assert our == their
        ids = [token["id"] for token in our["tokens"]]
        our, their = answers(both, "/detokenize", {"tokens": ids})
        assert our["content"] == their["content"]


def test_outputs_that_are_forced(both: Both) -> None:
    for fields in FORCED:
        body = {"prompt": "Hi, the", "n_predict": 100, "temperature": 0, **fields}
        our, their = answers(both, "/completion", body)
        assert our["content"] == their["content"]
        assert our["tokens_evaluated"] == their["tokens_evaluated"]


def test_how_many_tokens_a_prompt_has(both: Both) -> None:
    for text in TEXTS[:3]:
        body = {"prompt": text, "n_predict": 1, "temperature": 0}
        our, their = answers(both, "/completion", body)
        assert our["tokens_evaluated"] == their["tokens_evaluated"]
        assert our["prompt"] == their["prompt"]
