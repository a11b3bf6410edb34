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
            assert list(client.responses.retrieve(id_, stream=True)) == [*events, *rest]
            assert client.responses.retrieve(id_) == rest[-1].response
            with pytest.raises(openai.BadRequestError, match="the last event so far"):
                client.responses.retrieve(id_, stream=True, starting_after=10_000)

    async with serving_script(backend) as (url, _), cable_to(url) as cable:
        token = trio.lowlevel.current_trio_token()
        await trio.to_thread.run_sync(use, cable, token)


async def test_a_line_for_an_unknown_model_has_the_error_of_a_chat() -> None:
    def use(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
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
