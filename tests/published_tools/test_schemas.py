"""Every schema under every format: none fails a request; and what large lists of tools take."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.published_tools.install import tools_in
from tests.support.message_writers import WRITERS
from tests.support.tool_grammars import AUTO, REQUIRED, compiled, tail_of, tool
from tests.support.tool_schemas import corpus
from trioserve import llama
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.params import ToolChoice
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend

pytestmark = pytest.mark.system

SCHEMAS = {**corpus(), **tools_in(Path(os.environ["TEST_SCHEMAS"]))}
#: Tools of one request: so few that all are compiled at once.
_AT_ONCE = 12


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        assert isinstance(backend, LlamaBackend)
        yield backend


def offered(prefix: str) -> list[dict[str, Any]]:
    return [
        tool(f"{prefix}_{i}_{re.sub(r'[^a-zA-Z0-9]+', '_', name)[-40:]}", schema)
        for i, (name, schema) in enumerate(SCHEMAS.items())
    ]


def test_there_are_enough() -> None:
    assert len(SCHEMAS) >= 500


@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=lambda choice: choice.mode)
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_no_schema_fails_a_request(
    backend: LlamaBackend, name: str, choice: ToolChoice, record_property: Any
) -> None:
    writer = WRITERS[name]
    tools = offered(f"{name}_{choice.mode}".replace(".", "_"))
    parallel = name not in ("plain", "plain-think", "llama-3")  # whose calls are free else
    with capture_logs() as logs:
        for start in range(0, len(tools), _AT_ONCE):
            some = tools[start : start + _AT_ONCE]
            grammar = constrain(
                writer.format, some, choice, parallel=parallel, prompt_tail=tail_of(writer)
            )
            if grammar is not None:
                ready = compiled(backend, grammar)
                if ready.tools is not None:  # it is too long for all at once
                    for index in range(len(some)):
                        assert ready.tools.enforcing(frozenset([index])) is not None
    found = Counter(entry["relaxed"] for entry in logs)
    found["nothing"] = len(tools) - sum(found.values())
    record_property("relaxed", dict(found))
    assert found["all arguments"] < len(tools) / 20
    assert found["nothing"] > len(tools) / 2


@pytest.mark.parametrize("n", [160, 600])
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "gemma-4", "glm-4"])
def test_many_tools(backend: LlamaBackend, name: str, n: int, record_property: Any) -> None:
    tools = offered(f"many_{n}")[-n:]
    start = time.process_time()
    ready = compiled(backend, constrain(WRITERS[name].format, tools, AUTO, parallel=True))
    built = time.process_time()
    assert ready.tools is not None
    assert ready.tools.enforcing(frozenset([n // 2])) is not None
    named = time.process_time()
    record_property("seconds", f"{built - start:.3f} to build, {named - built:.3f} for one named")
