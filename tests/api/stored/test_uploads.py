"""Uploaded files that messages name: of every kind, in every API, and who may name them."""

from __future__ import annotations

import io
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.anthropic_api import ASK
from tests.support.clients import client_and_service, client_of, use_anthropic, use_openai
from tests.support.media_files import image_file, wav_file
from tests.support.pdf_files import pdf_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering, noting
from tests.support.stored import CHATS, begin, lines_of, until_over, upload as upload_file
from tests.support.waiting import until
from trioserve.api.stored import files as files_module
from trioserve.store import Records

TEXT = "File: a.txt\n```\nNine lives.\n```"
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def chat(*ids: str) -> dict[str, Any]:
    parts: list[Any] = [{"type": "file", "file": {"file_id": id_}} for id_ in ids]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "So?"}]}]}


def response(*ids: str) -> dict[str, Any]:
    parts = [{"type": "input_file", "file_id": id_} for id_ in ids]
    return {"input": [{"role": "user", "content": parts}]}


def message(*ids: str) -> dict[str, Any]:
    blocks = [{"type": "document", "source": {"type": "file", "file_id": id_}} for id_ in ids]
    return ASK | {"messages": [{"role": "user", "content": blocks}]}


#: The routes that read files, what they are asked, and where the first file is.
ROUTES = [
    (CHATS, chat, "messages[0].content[0].file.file_id"),
    ("/v1/responses", response, "input[0].content[0].file_id"),
    ("/v1/messages", message, "messages[0].content[0].source.file_id"),
    ("/v1/messages/count_tokens", message, "messages[0].content[0].source.file_id"),
    (f"{CHATS}/input_tokens", chat, "messages[0].content[0].file.file_id"),
]


async def upload(
    client: httpx.AsyncClient, data: bytes = b"Nine lives.\n", name: str = "a.txt"
) -> str:
    return await upload_file(client, data, name, "user_data")


@pytest.mark.system
async def test_openai_s_sdk_names_files_of_every_kind() -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())

    def use(client: openai.OpenAI) -> None:
        def made(name: str, data: bytes) -> str:
            file = client.files.create(file=(name, io.BytesIO(data)), purpose="user_data")
            assert (file.purpose, file.bytes) == ("user_data", len(data))
            return file.id

        image, sound = made("a.png", image_file(size=(8, 4))), made("a.wav", wav_file(0.5))
        pdf, text = made("a.pdf", pdf_file("Page one.")), made("a.txt", b"Nine lives.\n")
        asked: Any = chat(image, sound, pdf, text)["messages"]
        client.chat.completions.create(model="m", messages=asked)
        parts: list[Any] = [
            {"type": "input_image", "file_id": image, "detail": "auto"},
            {"type": "input_file", "file_id": pdf},
            {"type": "input_file", "file_id": text},
        ]
        given: Any = [{"role": "user", "content": parts}]
        first = client.responses.create(model="m", input=given, background=True)
        while first.status in ("queued", "in_progress"):
            first = client.responses.retrieve(first.id)
        assert first.status == "completed" and first.output_text == "A cat."
        (item,) = client.responses.input_items.list(first.id)
        assert item.to_dict()["content"] == parts  # the ids, not the files
        client.responses.create(model="m", input="And?", previous_response_id=first.id)
        # A deleted file cannot be read again.
        client.files.delete(image)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="And?", previous_response_id=first.id)
        assert caught.value.param == "previous_response_id.content[0].file_id"
        assert caught.value.code == "file_not_found"

    await use_openai(backend, use)
    assert len(prompts) == 3 and "(sound 0.5s)" in prompts[0]
    for said in ("(image 8x4)", "File: a.pdf, page 1\n```\nPage one.\n```", TEXT):
        assert all(said in each for each in prompts), said


@pytest.mark.system
async def test_anthropic_s_sdk_names_files() -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())

    def use(client: anthropic.Anthropic) -> None:
        made = [
            client.beta.files.upload(file=("a.png", image_file(size=(8, 4)), "image/png")),
            client.files.upload(file=("a.txt", b"Nine lives.\n")),
        ]
        first, second = made
        assert (first.mime_type, first.size_bytes) == ("image/png", len(image_file(size=(8, 4))))
        blocks: list[Any] = [
            {"type": "image", "source": {"type": "file", "file_id": first.id}},
            {"type": "document", "source": {"type": "file", "file_id": second.id}},
            {"type": "container_upload", "file_id": second.id},
        ]
        messages: list[Any] = [{"role": "user", "content": blocks}]
        client.messages.create(model="m", max_tokens=20, messages=messages)
        assert client.messages.count_tokens(model="m", messages=messages).input_tokens > 0
        # The routes of files.
        assert [each.id for each in client.files.list(limit=1)] == [second.id, first.id]
        assert [each.id for each in client.files.list(ids=[first.id, "none"])] == [first.id]
        assert client.files.retrieve_metadata(second.id).filename == "a.txt"
        assert client.files.download(second.id).read() == b"Nine lives.\n"
        assert client.files.delete(second.id).type == "file_deleted"
        with pytest.raises(anthropic.NotFoundError):
            client.files.retrieve_metadata(second.id)

    await use_anthropic(backend, use)
    assert "(image 8x4)" in prompts[0] and TEXT in prompts[0]


async def test_every_route_reads_the_files_of_its_key_alone() -> None:
    backend, prompts = noting("Hello")
    async with client_of(backend, api_keys=("one", "two")) as client:
        client.headers["Authorization"] = "Bearer one"
        id_ = await upload(client)
        for key, ids, expected in (
            ("one", [id_], 200),
            ("two", [id_], 400),
            ("one", ["file-none"], 400),
            ("one", ["x" * 100_000], 400),
            ("one", ["../../etc/passwd\0"], 400),
            ("one", [""], 400),
            ("one", [f"file-{n}" for n in range(300)], 400),
        ):
            client.headers["Authorization"] = f"Bearer {key}"
            for path, body, param in ROUTES:
                answer = await client.post(path, json=body(*ids))
                assert answer.status_code == expected, (path, ids, answer.text)
                if expected == 200:
                    continue
                said = answer.json()["error"]["message"]
                missing = f"'{param}' names no file that is stored here."
                assert said == missing or (len(ids) == 300 and "at most 256" in said)
    assert len(prompts) == 3 and all(TEXT in each for each in prompts)


async def test_a_file_may_be_named_often_and_counts_each_time() -> None:
    async with client_of(answering("Hello"), max_request_memory=2**22) as client:
        id_ = await upload(client, b"a" * 2**17)
        for n, expected in ((2, (200, 400)), (40, (413, 503))):
            answer = await client.post(f"{CHATS}/input_tokens", json=chat(*[id_] * n))
            assert answer.status_code in expected, answer.text


async def test_only_parts_name_files() -> None:
    backend, prompts = noting("Hello")
    async with client_of(backend) as client:
        id_ = await upload(client)
        call = {
            "type": "tool_use",
            "id": "t",
            "name": "f",
            "input": {"file_id": id_, "type": "file"},
        }
        result = {"type": "tool_result", "tool_use_id": "t", "content": "Read."}
        document = {"type": "document", "source": {"type": "file", "file_id": id_}}
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, document]},
        ]
        answer = await client.post("/v1/messages", json=ASK | {"messages": turns})
        assert answer.status_code == 200, answer.text
    assert f'"file_id": "{id_}"' in prompts[0] and TEXT in prompts[0]


async def test_a_file_that_is_deleted_meanwhile_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of it is never taken for the whole: neither by a message, nor by a batch."""
    async with client_and_service(answering("Hello")) as (client, service):
        data = b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(200_000))
        some = Records.some

        def deleting(records: Records, id: str, side: str, *, after: int = -1) -> Any:
            found = some(records, id, side, after=after)
            records.delete(id)
            return found

        for path, body, param in (
            (CHATS, chat, "messages[0].content[0].file.file_id"),
            ("/v1/batches", lambda id_: {"input_file_id": id_, "endpoint": CHATS}, "input_file_id"),
        ):
            id_ = await upload(client, data)
            with monkeypatch.context() as patch:
                patch.setattr(files_module.Records, "some", deleting)
                answer = await client.post(path, json=body(id_))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        await until(lambda: service.memory.n_held == 0)


async def test_the_lines_of_a_batch_name_files() -> None:
    backend, prompts = noting("Hello")
    async with client_of(backend) as client:
        id_ = await upload(client)
        lines = [
            {"custom_id": name, "method": "POST", "url": CHATS, "body": chat(file)}
            for name, file in (("a", id_), ("b", "file-none"))
        ]
        over = await until_over(client, (await begin(client, lines))["id"])
        (answered,) = await lines_of(client, over["output_file_id"])
        (failed,) = await lines_of(client, over["error_file_id"])
        assert (answered["custom_id"], failed["custom_id"]) == ("a", "b")
        assert failed["response"]["body"]["error"]["code"] == "file_not_found"
    assert TEXT in prompts[0]


@pytest.mark.parametrize("headers", [{}, ANTHROPIC])
async def test_a_form_needs_a_file(headers: dict[str, str]) -> None:
    async with client_of() as client:
        form = {"purpose": "batch", "expires_in_seconds": "3600"}
        files = {"other": ("a", b"x")}
        answer = await client.post("/v1/files", data=form, files=files, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
