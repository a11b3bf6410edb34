"""OpenAI's SDK, unchanged: what is stored, and the files of its batches."""

from __future__ import annotations

import io
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import trio
from openai.types import Batch

from tests.support.cable import Cable, cable_to
from tests.support.clients import TIMEOUT, use_openai
from tests.support.event_source import gated
from tests.support.fake_fleet import routed
from tests.support.http_server import serving_script
from tests.support.scripts import answering
from tests.support.served_model import served
from trioserve.config import Config

CHATS = "/v1/chat/completions"
#: Lines of the large batch; `BATCH_LINES=2000` takes a minute or two.
N_LINES = int(os.environ.get("BATCH_LINES", "200"))
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def line(n: int, body: dict[str, Any], url: str = CHATS) -> dict[str, Any]:
    return {"custom_id": f"line-{n}", "method": "POST", "url": url, "body": {"model": "a", **body}}


def begin(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHATS) -> Batch:
    data = b"\n".join(e if isinstance(e, bytes) else json.dumps(e).encode() for e in lines)
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def over(client: openai.OpenAI, batch: Batch) -> Batch:
    """Poll a batch to its end; its counts never go back."""
    seen, limit = 0, time.monotonic() + 20 * TIMEOUT
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < limit, batch
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert counts is not None and seen <= counts.completed + counts.failed <= counts.total
        seen = counts.completed + counts.failed
    return batch


def lines_in(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(e) for e in client.files.content(file).iter_lines()]


# -- on the bundled model


@pytest.fixture(scope="module")
def sdk() -> Iterator[openai.OpenAI]:
    config = Config(threads=1, ctx_size=4096, parallel=4)
    with (
        served(config) as server,
        openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="any") as client,
    ):
        yield client


def test_a_background_response_is_polled(sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(model="a", input="Hi", background=True, max_output_tokens=16)
    assert made.status in ("queued", "in_progress", "completed")
    while made.status in ("queued", "in_progress"):
        made = sdk.responses.retrieve(made.id)
    assert made.status in ("completed", "incomplete") and made.output
    assert made.usage is not None and 0 < made.usage.output_tokens <= 16
    (item,) = sdk.responses.input_items.list(made.id)
    assert item.type == "message"
    then = sdk.responses.create(
        model="a", input="And?", previous_response_id=made.id, max_output_tokens=2
    )
    items = list(sdk.responses.input_items.list(then.id, order="asc"))
    assert [each.id for each in items][1:-1] == [each.id for each in made.output]
    sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)


def test_a_conversation_grows(sdk: openai.OpenAI) -> None:
    conversation = sdk.conversations.create(items=[{"role": "user", "content": "I am Ann."}])
    said: list[str | None] = []
    for n in range(2):
        response = sdk.responses.create(
            model="a",
            input="Hi",
            conversation=conversation.id,
            max_output_tokens=2,
            background=bool(n),
        )
        while response.status in ("queued", "in_progress"):
            response = sdk.responses.retrieve(response.id)
        said += ["user", *(each.id for each in response.output)]
    items = list(sdk.conversations.items.list(conversation.id, order="asc"))
    found = ["user" if getattr(each, "role", "") == "user" else each.id for each in items]
    assert found == ["user", *said]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHATS, HI),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ],
)
def test_batches_of_all_endpoints(sdk: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    batch = over(sdk, begin(sdk, [line(n, body, endpoint) for n in range(3)], endpoint))
    answers = lines_in(sdk, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["line-0", "line-1", "line-2"]
    assert batch.error_file_id is None
    if endpoint == "/v1/responses":
        for each in answers:
            found = sdk.responses.retrieve(each["response"]["body"]["id"])
            assert found.to_dict()["output"] == each["response"]["body"]["output"]


def test_a_batch_of_messages(sdk: openai.OpenAI) -> None:
    file = sdk.files.create(file=("a.txt", io.BytesIO(b"Nine lives.")), purpose="user_data")
    source = {"type": "file", "file_id": file.id}
    content = [{"type": "document", "source": source}, {"type": "text", "text": "Hi"}]
    params: Any = {
        "model": "a",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    url = str(sdk.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key="any") as client:
        batches = client.messages.batches
        batch = batches.create(requests=[{"custom_id": str(n), "params": params} for n in range(5)])
        limit = time.monotonic() + 20 * TIMEOUT
        while batch.processing_status != "ended":
            assert time.monotonic() < limit, batch
            batch = batches.retrieve(batch.id)
        found = {each.custom_id: each.result for each in batches.results(batch.id)}
        assert found.keys() == {str(n) for n in range(5)}
        for result in found.values():
            assert result.type == "succeeded" and 1 <= result.message.usage.output_tokens <= 4
        # All but the first find the file in the cache.
        cached = [each.message.usage.cache_read_input_tokens for each in found.values()
                  if each.type == "succeeded"]  # fmt: skip
        assert sum(bool(each) for each in cached) >= 4


def test_a_stored_chat(sdk: openai.OpenAI) -> None:
    messages: Any = HI["messages"]
    stream = sdk.chat.completions.create(
        model="a", messages=messages, max_tokens=4, store=True, stream=True, metadata={"a": "b"}
    )
    chunks = list(stream)
    said = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    found = sdk.chat.completions.retrieve(chunks[0].id)
    assert found.choices[0].message.content == said
    assert [each.id for each in sdk.chat.completions.list(metadata={"a": "b"})] == [found.id]


def test_a_batch_of_embeddings() -> None:
    config = Config(threads=1, ctx_size=512, embeddings=True, pooling="mean")
    with served(config) as server:
        sdk = openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="any")
        url = "/v1/embeddings"
        lines = [line(n, {"input": f"Text {n}"}, url) for n in range(3)]
        batch = over(sdk, begin(sdk, lines, url))
        assert batch.error_file_id is None, lines_in(sdk, batch.error_file_id)
        vectors = [
            each["response"]["body"]["data"][0]["embedding"]
            for each in lines_in(sdk, batch.output_file_id)
        ]
        assert len(vectors) == 3 and all(len(each) == len(vectors[0]) > 1 for each in vectors)
        direct = sdk.embeddings.create(model="a", input="Text 2", encoding_format="float")
        assert vectors[2] == pytest.approx(direct.data[0].embedding, abs=1e-4)


@pytest.mark.system
@pytest.mark.timeout(1200)  # for 2,000 lines beside other tests
def test_a_batch_of_many_lines(sdk: openai.OpenAI) -> None:
    lines = [
        line(n, {**HI, "messages": [{"role": "user", "content": f"{n}?"}]}) for n in range(N_LINES)
    ]
    batch = over(sdk, begin(sdk, lines))
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (N_LINES, N_LINES, 0)
    answers = lines_in(sdk, batch.output_file_id)
    assert Counter(e["custom_id"] for e in answers) == Counter(e["custom_id"] for e in lines)
    assert all(e["response"]["body"]["usage"]["completion_tokens"] <= 2 for e in answers)


# -- where a script says what happens when


async def test_a_stream_comes_back_after_its_connection_was_cut() -> None:
    said = "0123456789 " * 40
    backend, gate = gated(said)

    def use(cable: Cable, token: trio.lowlevel.TrioToken) -> None:
        with openai.OpenAI(base_url=f"{cable.url}/v1", api_key="any", max_retries=0) as client:
            gate.allow(100)  # a slow machine prefills in more steps
            made = client.responses.create(model="a", input="Hi", background=True, stream=True)
            events = []
            # It may be cut in the middle of an event, which the SDK cannot parse then.
            with pytest.raises((openai.APIError, ValueError)), made as stream:
                for event in stream:
                    events.append(event)
                    gate.allow(20)  # several tokens may have come as one event
                    if len(events) == 6:
                        trio.from_thread.run(cable.unplug, trio_token=token)
            trio.from_thread.run(cable.plug_in, trio_token=token)
            gate.open()
            id_, last = events[0].response.id, events[-1].sequence_number
            rest = list(client.responses.retrieve(id_, stream=True, starting_after=last))
            numbers = [event.sequence_number for event in [*events, *rest]]
            assert numbers == list(range(len(numbers)))
            text = "".join(e.delta for e in [*events, *rest] if e.type.endswith("text.delta"))
            assert text == said
            with client.responses.stream(response_id=id_, starting_after=last) as again:
                assert [event.sequence_number for event in again] == numbers[last + 1 :]
                assert again.get_final_response().output_text == text

    async with serving_script(backend) as (url, _), cable_to(url) as cable:
        token = trio.lowlevel.current_trio_token()
        await trio.to_thread.run_sync(use, cable, token)


async def test_a_background_response_and_a_batch_are_cancelled() -> None:
    backend, gate = gated("0123456789" * 20, n_slots=1)

    def use(client: openai.OpenAI) -> None:
        gate.allow(3)
        made = client.responses.create(model="a", input="Hi", background=True)
        cancelled = client.responses.cancel(made.id)
        assert cancelled.status == "cancelled" == client.responses.retrieve(made.id).status
        batch = begin(client, [line(n, {**HI, "max_tokens": 8}) for n in range(30)])
        gate.allow(120)
        while not (counts := client.batches.retrieve(batch.id).request_counts).completed:
            pass
        assert counts.total == 30 and counts.failed == 0
        assert client.batches.cancel(batch.id).status == "cancelling"
        gate.open()
        batch = over(client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at is not None
        n_answers = len(lines_in(client, batch.output_file_id))
        assert 0 < n_answers == batch.request_counts.completed < 30

    await use_openai(backend, use, parallel=1)


async def test_lines_that_cannot_be_answered() -> None:
    wrong = [b'{"custom_id": ', line(1, HI, "/v1/embeddings"), line(0, HI)]

    def use(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        failed = begin(client, [line(0, HI), *wrong])
        assert failed.status == "failed" and failed.errors is not None
        assert [(e.line, e.param) for e in failed.errors.data or ()] == [
            (2, None), (3, "url"), (4, "custom_id"),
        ]  # fmt: skip
        asked = {**HI, "model": "a"}
        mixed = over(client, begin(client, [line(0, asked), line(1, {**HI, "model": "none"})]))
        assert mixed.status == "completed"
        (good,), (bad,) = (
            lines_in(client, id_) for id_ in (mixed.output_file_id, mixed.error_file_id)
        )
        assert (good["custom_id"], good["response"]["status_code"]) == ("line-0", 200)
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(**{**HI, "model": "none"})
        assert bad["custom_id"] == "line-1"
        assert bad["response"]["status_code"] == refused.value.status_code
        assert bad["response"]["body"]["error"] == refused.value.body
        assert "none" in refused.value.message

    async with routed({"a": answering("Hello"), "b": None}) as router:
        await trio.to_thread.run_sync(use, router.url)


async def test_files_are_listed_in_pages(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        made = [
            client.files.create(
                file=(f"{n}.jsonl", json.dumps(line(n, HI)).encode()), purpose="batch"
            )
            for n in range(5)
        ]
        for order, expected in (("asc", made), ("desc", made[::-1])):
            listed = client.files.list(limit=2, order=order, purpose="batch")  # type: ignore[arg-type]
            assert list(listed) == expected  # three pages
        assert not list(client.files.list(purpose="batch_output"))
        assert client.files.content(made[3].id).read() == json.dumps(line(3, HI)).encode()
        client.files.content(made[3].id).write_to_file(tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == json.dumps(line(3, HI)).encode()
        assert client.files.wait_for_processing(made[3].id).filename == "3.jsonl"
        assert client.files.delete(made[3].id).deleted
        assert list(client.files.list(order="asc")) == [*made[:3], made[4]]

    await use_openai(answering("Hello"), use)
