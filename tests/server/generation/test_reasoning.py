"""Reasoning through `Server`: the bundled model, and control tokens with a script."""

from __future__ import annotations

import json
from typing import Any

from tests.support.scripts import NamedVocab
from trioserve.config import Config
from trioserve.server import Server
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import Grammar

ASK = [{"role": "user", "content": "What is 2+3?"}]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"sum": {"enum": [4, 5, 6]}},
        "required": ["sum"],
        "additionalProperties": False,
    }
)


def config(**settings: Any) -> Config:
    return Config(threads=1, ctx_size=2048, **settings)


async def test_a_real_model_thinks_and_then_answers_with_json() -> None:
    async with Server(config()) as server:

        async def ask(**settings: Any) -> tuple[str, str]:
            done = await server.chat(ASK, temperature=0.0, max_tokens=100, **settings)
            return done.message.reasoning_content, done.message.content

        grammar = Grammar("json_schema", SCHEMA)
        free, answer = await ask()
        assert free
        assert "5" in answer

        reasoning, answer = await ask(grammar=grammar)
        assert reasoning == free
        assert json.loads(answer)["sum"] in (4, 5, 6)

        reasoning, answer = await ask(grammar=grammar, reasoning_budget=2, reasoning_message=" Hm.")
        assert reasoning.endswith(" Hm.")
        assert free.startswith(reasoning.removesuffix(" Hm."))
        assert json.loads(answer)["sum"] in (4, 5, 6)

        reasoning, answer = await ask(grammar=grammar, reasoning_budget=0)
        assert reasoning == ""
        assert json.loads(answer)["sum"] in (4, 5, 6)

        reasoning, answer = await ask(grammar=grammar, reasoning_format="none")
        assert json.loads(answer)["sum"] in (4, 5, 6)

        begun = [*ASK, {"role": "assistant", "content": "", "reasoning_content": "Two and"}]
        reasoning, answer = await ask_on(server, begun, grammar)
        assert reasoning
        assert json.loads(answer)["sum"] in (4, 5, 6)

        begun = [*ASK, {"role": "assistant", "content": '{"sum"'}]
        done = await server.chat(
            begun,
            continue_final_message="content",
            grammar=Grammar("regex", ":[456]}"),
            temperature=0.0,
        )
        assert json.loads('{"sum"' + done.message.content)["sum"] in (4, 5, 6)


async def ask_on(server: Server, messages: list[dict[str, str]], grammar: Grammar) -> Any:
    done = await server.chat(
        messages,
        continue_final_message="reasoning_content",
        grammar=grammar,
        reasoning_budget=8,
        temperature=0.0,
        max_tokens=100,
    )
    return done.message.reasoning_content, done.message.content


MISTRAL = """\
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{{- '[INST]' + message.content + '[/INST]' -}}
  {%- elif message.tool_calls -%}
    {{- '[TOOL_CALLS][' -}}
    {%- for call in message.tool_calls -%}
      {{- call.function | tojson -}}{%- if not loop.last %}, {% endif -%}
    {%- endfor -%}
    {{- ']' -}}
  {%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) -}}{%- endif -%}
"""


async def test_markers_that_are_control_tokens_are_seen() -> None:
    backend = ScriptedBackend(
        lambda _: 'Well.Z[{"name": "f", "arguments": {}}]', chat_template=MISTRAL
    )
    vocab = NamedVocab(backend, b"[TOOL_CALLS]")
    vocab.tokenize = backend.vocab.tokenize  # type: ignore[attr-defined]
    backend.vocab = vocab  # type: ignore[assignment]
    async with Server(Config(), load=scripted(backend)) as server:
        done = await server.chat(ASK)
        (call,) = done.message.tool_calls
        assert (call.name, done.message.content) == ("f", "Well.")
        plain = await server.complete("Hi")
        assert plain.text == 'Well.[{"name": "f", "arguments": {}}]'
