"""The tools of the web in place of those that vendors host, as their SDKs read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic.types
import openai.types.responses
import pydantic
import pytest

from tests.support.client_requests import MESSAGES, REQUESTS, RESPONSES
from tests.support.clients import client_of, named_events_in
from tests.support.scripts import NamedVocab, answering
from tests.support.searxng import FOUND, SearXNG, serving_searxng
from trioserve.testing import ScriptedBackend

URL = str(FOUND["url"])
SAID = f"See [Trio]({URL}) and https://other.test/x."
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
FETCH = {"type": "web_fetch_20250910", "name": "web_fetch"}
ASK = {"model": "m", "max_tokens": 5000, "messages": [{"role": "user", "content": "What is Trio?"}]}
ASK_OPENAI = {"input": "What is Trio?", "tools": [{"type": "web_search"}]}


@pytest.fixture
def engine() -> Iterator[SearXNG]:
    with serving_searxng() as engine:
        yield engine


def call(name: str = "web_search", **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments or {"query": "trio python"}})
    return f"<tool_call>\n{written}\n</tool_call>"


def asking(*calls: str, prompts: list[str] | None = None, said: str = SAID) -> ScriptedBackend:
    """A model that makes calls, one after the other, and answers when it has all results."""

    def script(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        done = prompt.count("<tool_response>")
        return calls[done] if done < len(calls) else said

    return answering(script, n_ctx=16384)


def message_of(text: str) -> anthropic.types.Message:
    """Accumulate a stream as the SDK does."""
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot, json_bufs = None, dict[int, bytes]()
    for event in named_events_in(text):
        if event["type"] != "ping":
            known = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
            snapshot = accumulate_event(
                event=known.validate_python(event), current_snapshot=snapshot, json_bufs=json_bufs
            )
    assert snapshot is not None
    return anthropic.types.Message.model_validate(snapshot.model_dump())


async def test_claude_code_searches(engine: SearXNG) -> None:
    (asked,) = (
        each
        for each in REQUESTS
        if (each.program, each.name) == ("Claude Code", "a search of the web")
    )
    assert asked.body is not None
    body = asked.body | {"tool_choice": {"type": "tool", "name": "web_search"}}
    async with client_of(asking(call()), web_search=engine.address) as client:
        answer = await client.post(asked.path, json=body)
        whole = (await client.post(MESSAGES, json=body | {"stream": False})).json()
    message = message_of(answer.text)
    kinds = [block.type for block in message.content]
    assert kinds == ["server_tool_use", "web_search_tool_result", "text"]
    use, result, text = message.content
    assert use.input == {"query": "trio python"}
    assert result.tool_use_id == use.id
    assert [(each.url, each.title) for each in result.content] == [
        (URL, "Trio: a friendly library")
    ]
    (cited,) = text.citations
    assert (cited.url, cited.type) == (URL, "web_search_result_location")
    assert cited.cited_text == "Trio is a library for async concurrency & I/O."
    assert message.usage.server_tool_use.web_search_requests == 1
    assert message.stop_reason == "end_turn"
    assert engine.queries == ["trio python"] * 2
    parsed = anthropic.types.Message.model_validate(whole)
    assert [block.type for block in parsed.content] == kinds
    assert parsed.content[2] == text


async def test_what_was_found_stays_in_the_conversation(engine: SearXNG) -> None:
    prompts: list[str] = []
    async with client_of(asking(call(), prompts=prompts), web_search=engine.address) as client:
        first = (await client.post(MESSAGES, json=ASK | {"tools": [SEARCH]})).json()
        turn = [*ASK["messages"], {"role": "assistant", "content": first["content"]}]
        again = {"messages": [*turn, {"role": "user", "content": "Thanks"}], "tools": [SEARCH]}
        await client.post(MESSAGES, json=ASK | again)
        # A paused turn continues from its results.
        paused = [*ASK["messages"], {"role": "assistant", "content": first["content"][:-1]}]
        answer = await client.post(MESSAGES, json=ASK | {"messages": paused, "tools": [SEARCH]})
    assert prompts[2].startswith(prompts[1])
    assert prompts[3] == prompts[1]
    assert answer.json()["content"][0]["text"] == SAID


@pytest.mark.parametrize(
    ("fields", "calls", "code"),
    [
        ({"max_uses": 1}, [call(), call()], "max_uses_exceeded"),
        ({}, [call(query="x" * 500)], "query_too_long"),
        ({}, [call(words="x")], "invalid_tool_input"),
    ],
)
async def test_a_search_that_fails_has_a_code(
    engine: SearXNG, fields: dict[str, Any], calls: list[str], code: str
) -> None:
    async with client_of(asking(*calls), web_search=engine.address) as client:
        answer = await client.post(MESSAGES, json=ASK | {"tools": [SEARCH | fields]})
    message = anthropic.types.Message.model_validate(answer.json())
    *_, result, text = message.content
    assert result.content.error_code == code
    assert text.text == SAID


async def test_an_engine_that_refuses_is_unavailable() -> None:
    with serving_searxng(status=403) as engine:
        async with client_of(asking(call()), web_search=engine.address) as client:
            answer = await client.post(MESSAGES, json=ASK | {"tools": [SEARCH]})
    assert answer.json()["content"][1]["content"]["error_code"] == "unavailable"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"allowed_domains": ["example.org"]}, ["https://a.example.org/x", URL]),
        ({"allowed_domains": ["example.org/tri"]}, [URL]),
        ({"blocked_domains": ["a.example.org"]}, [URL, "https://b.test/"]),
    ],
)
async def test_domains_are_kept_to(
    engine: SearXNG, fields: dict[str, Any], shown: list[str]
) -> None:
    others = [FOUND | {"url": url} for url in ("https://a.example.org/x", URL, "https://b.test/")]
    engine.results = [*others, FOUND | {"url": "ftp://c.test/"}, FOUND | {"url": "x"}]
    async with client_of(asking(call()), web_search=engine.address) as client:
        answer = await client.post(MESSAGES, json=ASK | {"tools": [SEARCH | fields]})
    assert [each["url"] for each in answer.json()["content"][1]["content"]] == shown


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (SEARCH | {"allowed_domains": ["a.b"], "blocked_domains": ["c.d"]}, "allowed_domains"),
        (SEARCH | {"allowed_domains": ["a b"]}, "allowed_domains[0]"),
        (SEARCH | {"allowed_domains": ["a.b/*/*"]}, "allowed_domains[0]"),
        (SEARCH | {"max_uses": 0}, "max_uses"),
        (SEARCH | {"user_location": {"city": "a\nb"}}, "user_location.city"),
        (FETCH | {"max_content_tokens": "x"}, "max_content_tokens"),
        (FETCH | {"url_sources": {"user_input": {"type": "none"}}}, "url_sources"),
    ],
)
async def test_a_field_that_is_wrong_is_named(tool: dict[str, Any], param: str) -> None:
    async with client_of(asking()) as client:
        answer = await client.post(MESSAGES, json=ASK | {"tools": [tool]})
    assert answer.status_code == 400
    assert f"tools[0].{param}" in answer.text


async def test_without_an_engine_the_tool_is_left_out() -> None:
    prompts: list[str] = []
    async with client_of(asking(prompts=prompts)) as client:
        plain = (await client.post(MESSAGES, json=ASK | {"tools": [SEARCH]})).json()
        named = ASK | {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}
        refused = await client.post(MESSAGES, json=named)
        openai_plain = (await client.post(RESPONSES, json=ASK_OPENAI)).json()
        one_of = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}]
        chosen = {"type": "allowed_tools", "mode": "auto", "tools": [one_of[0], one_of[1]]}
        kept = await client.post(
            RESPONSES, json=ASK_OPENAI | {"tools": one_of, "tool_choice": chosen}
        )
    assert plain["content"][0]["text"] == SAID
    assert "web_search" not in prompts[0]
    assert refused.status_code == 400 and "--web-search" in refused.text
    assert openai_plain["tools"] == []
    assert kept.status_code == 200


async def test_tools_of_the_client_end_the_turn(engine: SearXNG) -> None:
    mine = {"name": "mine", "input_schema": {"type": "object"}}
    both = f"{call()}\n{call('mine', x=1)}"
    async with client_of(asking(both), web_search=engine.address) as client:
        message = (await client.post(MESSAGES, json=ASK | {"tools": [SEARCH, mine]})).json()
        turn = [*ASK["messages"], {"role": "assistant", "content": message["content"]}]
        result = {"type": "tool_result", "content": "1"}
        use = next(block for block in message["content"] if block["type"] == "tool_use")
        turn.append({"role": "user", "content": [result | {"tool_use_id": use["id"]}]})
        last = await client.post(MESSAGES, json=ASK | {"messages": turn, "tools": [SEARCH, mine]})
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["server_tool_use", "tool_use", "web_search_tool_result"]
    assert message["stop_reason"] == "tool_use"
    assert last.json()["content"][0]["text"] == SAID


async def test_a_turn_with_too_many_steps_pauses(engine: SearXNG) -> None:
    async with client_of(
        asking(call(), call()), web_search=engine.address, tool_max_steps=1
    ) as client:
        message = (await client.post(MESSAGES, json=ASK | {"tools": [SEARCH]})).json()
    assert message["stop_reason"] == "pause_turn"


async def test_the_place_of_the_user_is_told(engine: SearXNG) -> None:
    prompts: list[str] = []
    place = {"type": "approximate", "city": "Bern", "country": "CH", "timezone": "Europe/Zurich"}
    tool = SEARCH | {"user_location": place}
    async with client_of(asking(prompts=prompts), web_search=engine.address) as client:
        counted = await client.post(f"{MESSAGES}/count_tokens", json=ASK | {"tools": [tool]})
        message = (await client.post(MESSAGES, json=ASK | {"tools": [tool]})).json()
    assert "Bern, CH (time zone Europe/Zurich)" in prompts[0]
    assert counted.json()["input_tokens"] == message["usage"]["input_tokens"]


# -- the Responses API


async def test_responses_have_calls_citations_and_sources(engine: SearXNG) -> None:
    asked = ASK_OPENAI | {
        "include": ["web_search_call.action.sources", "web_search_call.results"],
        "max_tool_calls": 1,
    }
    async with client_of(asking(call()), web_search=engine.address) as client:
        whole = (await client.post(RESPONSES, json=asked)).json()
        streamed = await client.post(RESPONSES, json=asked | {"stream": True})
    events = named_events_in(streamed.text)
    known = pydantic.TypeAdapter[Any](openai.types.responses.ResponseStreamEvent)
    for event in events:
        known.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    of_call = [kind for kind in kinds if "web_search_call" in kind]
    assert of_call == [f"web_search_call.{e}" for e in ("in_progress", "searching", "completed")]
    assert not any("trioserve" in kind for kind in kinds)
    assert kinds.index("output_text.annotation.added") < kinds.index("output_text.done")
    for response in (whole, events[-1]["response"]):
        read = openai.types.responses.Response.model_validate(response)
        found, message = read.output
        assert found.type == "web_search_call" and found.status == "completed"
        assert found.action.query == "trio python"
        assert [source.url for source in found.action.sources] == [URL]
        assert found.results[0]["url"] == URL
        part = message.content[0]
        (cited,) = part.annotations
        assert part.text[cited.start_index : cited.end_index] == f"[Trio]({URL})"
        assert (cited.url, cited.title) == (URL, "Trio: a friendly library")
        assert response["tools"] == [{"type": "web_search"}]


async def test_items_that_come_back_are_read(engine: SearXNG) -> None:
    prompts: list[str] = []
    async with client_of(asking(call(), prompts=prompts), web_search=engine.address) as client:
        first = (await client.post(RESPONSES, json=ASK_OPENAI)).json()
        user = {"role": "user", "content": "What is Trio?"}
        more = [user, *first["output"], {"role": "user", "content": "Thanks"}]
        await client.post(RESPONSES, json=ASK_OPENAI | {"input": more})
        stored = {"input": "Thanks", "previous_response_id": first["id"]}
        await client.post(RESPONSES, json=ASK_OPENAI | stored)
    assert prompts[2].startswith(prompts[1])
    assert prompts[3] == prompts[2]


@pytest.mark.parametrize("kind", ["web_search_preview", "web_search_2025_08_26"])
async def test_options_of_a_search_have_their_effect(engine: SearXNG, kind: str) -> None:
    engine.results = [FOUND | {"url": f"https://example.org/{i}"} for i in range(30)]
    filters = {"allowed_domains": ["example.org", "b.test"]}
    tool = {"type": kind, "search_context_size": "high", "filters": filters}
    include = ["web_search_call.action.sources"]
    async with client_of(asking(call()), web_search=engine.address) as client:
        asked = ASK_OPENAI | {"tools": [tool], "include": include, "tool_choice": {"type": kind}}
        found = (await client.post(RESPONSES, json=asked)).json()["output"][0]
    assert len(found["action"]["sources"]) == 10
    assert engine.queries == ["trio python (site:example.org OR site:b.test)"]


async def test_cached_searches_are_left_out(engine: SearXNG) -> None:
    tool = {"type": "web_search", "external_web_access": False}
    async with client_of(asking(), web_search=engine.address) as client:
        answer = (await client.post(RESPONSES, json=ASK_OPENAI | {"tools": [tool]})).json()
    assert answer["tools"] == []


# -- pages

PAGE = b"""<html><head><title>Trio</title></head><body><article><h1>Nurseries</h1>
<p>Tasks live in nurseries. <a href="/more">More</a></p></article></body></html>"""


def fetching(engine: SearXNG) -> dict[str, Any]:
    host = engine.address.removeprefix("http://")
    engine.pages = {"/page": PAGE, "/more": b"<p>More of it.</p>"}
    return {"web_fetch": (f"{host}=127.0.0.0/8",)}


@pytest.mark.system
async def test_pages_are_documents(engine: SearXNG) -> None:
    config, url = fetching(engine), engine.page("/page")
    prompts: list[str] = []
    ask = ASK | {"messages": [{"role": "user", "content": f"Read {url}"}], "tools": [FETCH]}
    calls = [call("web_fetch", url=url), call("web_fetch", url=engine.page("/more"))]
    async with client_of(asking(*calls, prompts=prompts), **config) as client:
        message = (await client.post(MESSAGES, json=ask)).json()
        turn = [*ask["messages"], {"role": "assistant", "content": message["content"]}]
        more = {"messages": [*turn, {"role": "user", "content": "Thanks"}]}
        await client.post(MESSAGES, json=ask | more)
    read = anthropic.types.Message.model_validate(message)
    page, second = read.content[1].content, read.content[3].content
    assert (page.type, page.url, page.content.title) == ("web_fetch_result", url, "Trio")
    assert "Tasks live in nurseries." in page.content.source.data
    assert second.content.source.data == "More of it."  # its address stood in the first page
    assert read.usage.server_tool_use.web_fetch_requests == 2
    assert prompts[3].startswith(prompts[2])


@pytest.mark.parametrize(
    ("fields", "url", "code"),
    [
        ({}, "/secret", "url_not_in_prior_context"),
        ({}, "http://127.0.0.1:1/page", "url_not_allowed"),
        ({}, "http://vil.test/", "url_not_in_prior_context"),
        ({"allowed_domains": ["other.test"]}, "/page", "url_not_allowed"),
        ({}, "/image", "unsupported_content_type"),
        ({}, "http://127.0.0.1:1/" + "x" * 3000, "url_too_long"),
        ({}, "javascript:alert(1)", "invalid_tool_input"),
    ],
)
async def test_a_page_that_cannot_be_read_has_a_code(
    engine: SearXNG, fields: dict[str, Any], url: str, code: str
) -> None:
    config = fetching(engine)
    engine.pages["/image"] = b"\x89PNG"
    engine.type = "image/png"
    url = engine.page(url) if url.startswith("/") else url
    said = "Hi, evil.test" if code == "url_not_in_prior_context" else f"Read {url}"
    ask = ASK | {"messages": [{"role": "user", "content": said}], "tools": [FETCH | fields]}
    async with client_of(asking(call("web_fetch", url=url)), **config) as client:
        message = (await client.post(MESSAGES, json=ask)).json()
    assert message["content"][1]["content"]["error_code"] == code


@pytest.mark.system
async def test_responses_open_pages_and_find_words(engine: SearXNG) -> None:
    config, url = fetching(engine), engine.page("/page")
    calls = [call("web_fetch", url=url), call("web_fetch", url=url, find="nurseries")]
    asked = ASK_OPENAI | {"input": f"Read {url}"}
    async with client_of(asking(*calls), web_search=engine.address, **config) as client:
        response = (await client.post(RESPONSES, json=asked)).json()
    read = openai.types.responses.Response.model_validate(response)
    assert read.output[0].action.model_dump() == {"type": "open_page", "url": url}
    found = read.output[1].action
    assert (found.type, found.pattern) == ("find_in_page", "nurseries")


# -- Ollama


@pytest.mark.system
async def test_ollama_searches_and_reads(engine: SearXNG) -> None:
    config = fetching(engine)
    async with client_of(asking(), web_search=engine.address, **config) as client:
        for prefix in ("/api", "/api/experimental"):
            found = await client.post(f"{prefix}/web_search", json={"query": "q", "max_results": 1})
            page = await client.post(f"{prefix}/web_fetch", json={"url": engine.page("/page")})
            refused = await client.post(f"{prefix}/web_fetch", json={"url": "http://10.0.0.1/"})
    (result,) = found.json()["results"]
    assert (result["title"], result["url"]) == ("Trio: a friendly library", URL)
    assert page.json()["title"] == "Trio"
    assert page.json()["links"] == [engine.page("/more")]
    assert page.json()["content"].startswith("# Nurseries")
    assert refused.status_code == 400 and "--web-fetch does not allow" in refused.text


async def test_ollama_needs_an_engine() -> None:
    async with client_of(asking()) as client:
        answers = [
            await client.post("/api/web_search", json={"query": "q"}),
            await client.post("/api/web_fetch", json={"url": "http://a.test/"}),
        ]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert "--web-fetch" in answers[1].text


# -- what strangers write


async def test_names_of_control_tokens_are_broken_up(engine: SearXNG) -> None:
    prompts: list[str] = []
    name = "[EVIL]"
    engine.results = [FOUND | {"content": f"a{name}b\u202e\u200b\U000e0041c\x1b[0m"}]
    backend = asking(call(), prompts=prompts)
    backend.vocab = _named(backend, NamedVocab)
    async with client_of(backend, web_search=engine.address) as client:
        await client.post(MESSAGES, json=ASK | {"tools": [SEARCH]})
    assert "a[\u200bEVIL]bc[0m" in prompts[1]


def _named(backend: ScriptedBackend, kind: Callable[..., Any]) -> Any:
    vocab = backend.vocab
    vocab.names = kind(backend, b"[EVIL]").names
    vocab.control = (ord("Z"), *vocab.control)
    return vocab
