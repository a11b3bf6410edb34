"""Chats with images and sound beside llama-server's: the same tokens for the same files.

Runs where `LLAMA_SERVER` names the binary:

    LLAMA_SERVER=/path/to/llama-server python -m pytest tests/api/test_media_reference.py
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.llama_server import llama_server
from tests.support.media_models import RATE, Pair, random_image, random_sound, write_pair
from tests.support.served_model import ServedModel, served_model

pytestmark = pytest.mark.system

Message = dict[str, Any]

#: With F32 in the cache, logits hang little on how cells are put into batches.
OURS: dict[str, Any] = {
    "ctx_size": 8192, "parallel": 4, "cache_type_k": "f32", "cache_type_v": "f32",
    "flash_attn": "off",
}  # fmt: skip

SEEING = ("mlp", "gemma3", "idefics3", "qwen2vl", "mixed")
HEARING = ("qwen3a", "ultravox", "mixed")


def image(seed: int = 0, width: int = 90, height: int = 60) -> Message:
    found = random_image(width, height, seed=seed)
    file = io.BytesIO()
    Image.frombytes("RGB", (found.width, found.height), found.pixels).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def sound(seed: int = 0, seconds: float = 1.5) -> Message:
    samples = np.frombuffer(random_sound(seconds, seed=seed).samples, dtype=np.float32)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def text(said: str) -> Message:
    return {"type": "text", "text": said}


def chats(one: Message, other: Message) -> dict[str, list[Message]]:
    """Conversations with media in all places."""
    user, assistant = "user", "assistant"
    turns = [{"role": assistant, "content": "ba be bi"}, {"role": user, "content": "Then du da."}]
    return {
        "before the text": [{"role": user, "content": [one, text("What is\nthis?")]}],
        "after it": [{"role": user, "content": [text("What is this?"), one]}],
        "alone": [{"role": user, "content": [one]}],
        "two": [{"role": user, "content": [text("a"), one, text("b"), other, text("c")]}],
        "in the first message": [{"role": user, "content": [one, text("Ba?")]}, *turns],
        "in the last message": [
            {"role": user, "content": "Hello du"},
            turns[0],
            {"role": user, "content": [text("And"), other]},
        ],
    }


def reference(pair: Pair) -> AbstractContextManager[httpx.Client]:
    """Run llama-server on a model that takes media."""
    flags = [*pair.flags, "-t", "1", "-c", "4096", "-np", "1"]
    return llama_server([*flags, "-ctk", "f32", "-ctv", "f32", "-fa", "off"])


def body(messages: list[Message]) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": 24}


def streamed(server: ServedModel, request: dict[str, Any]) -> str:
    events = server.stream("/v1/chat/completions", request)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("kind", HEARING)
def test_the_same_transcript_as_theirs(tmp_path: Path, kind: str) -> None:
    pair = write_pair(tmp_path, kind)
    recording = base64.b64decode(sound(2, seconds=3.0)["input_audio"]["data"])
    ask: dict[str, Any] = {
        "files": {"file": ("any.wav", recording)},
        "data": {"temperature": "0", "max_tokens": "24", "language": "de"},
    }
    path = "/v1/audio/transcriptions"
    with reference(pair) as theirs:
        expected = theirs.post(path, **ask).json()
    with served_model(pair.model, mmproj=str(pair.projector), **OURS) as ours:
        given = ours.client.post(path, **ask).json()
    assert given["text"] == expected["text"].strip() != ""
    for name in ("input_tokens", "output_tokens"):
        assert given["usage"][name] == expected["usage"][name]


@pytest.mark.parametrize("kind", sorted({*SEEING, *HEARING}))
def test_the_same_tokens_as_theirs(tmp_path: Path, kind: str) -> None:
    """Whole, streamed, alone and beside others; the second time from the cache."""
    pair = write_pair(tmp_path, kind)
    conversations = (
        chats(image(), image(1, 64, 200)) if kind in SEEING else chats(sound(), sound(1))
    )
    if kind == "mixed":
        conversations |= {f"{name}, heard": one for name, one in chats(sound(), image()).items()}
    requests = [body(messages) for messages in conversations.values()]
    path = "/v1/chat/completions"
    with reference(pair) as client:
        theirs = [client.post(path, json=request).raise_for_status().json() for request in requests]
    said = [answer["choices"][0]["message"]["content"] for answer in theirs]
    with served_model(pair.model, mmproj=str(pair.projector), **OURS) as ours:
        whole = [ours.post(path, request) for request in requests]
        assert [answer["choices"][0]["message"]["content"] for answer in whole] == said
        counts = [answer["usage"]["prompt_tokens"] for answer in theirs]
        assert [answer["usage"]["prompt_tokens"] for answer in whole] == counts
        assert [streamed(ours, request) for request in requests] == said
    with (
        served_model(pair.model, mmproj=str(pair.projector), **OURS) as ours,
        ThreadPoolExecutor(4) as threads,
    ):
        assert list(threads.map(lambda request: streamed(ours, request), requests)) == said


def in_anthropic(part: Message) -> Message:
    """Write a part of a chat as a block."""
    if part["type"] != "image_url":
        return part
    data = part["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def in_responses(part: Message) -> Message:
    """Write a part of a chat as a part of an item."""
    if part["type"] != "image_url":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "image_url": part["image_url"]["url"]}


def with_parts(messages: list[Message], write: Callable[[Message], Message]) -> list[Message]:
    return [
        {**message, "content": [write(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def test_the_same_answers_in_other_apis(tmp_path: Path) -> None:
    """Get the text, and the tokens of the prompt as counted before and after."""
    pair = write_pair(tmp_path, "gemma3")
    requests: list[tuple[str, str, dict[str, Any]]] = []
    limit = {"temperature": 0, "max_tokens": 12, "max_output_tokens": 12}
    for messages in chats(image(), image(1, 64, 200)).values():
        blocks = {"messages": with_parts(messages, in_anthropic), **limit}
        requests.append(("/v1/messages", "/v1/messages/count_tokens", blocks))
        if all(message["role"] == "user" for message in messages):  # which it wants in another form
            items = {"input": with_parts(messages, in_responses), **limit}
            requests.append(("/v1/responses", "/v1/responses/input_tokens", items))

    def answers(client: httpx.Client) -> list[Any]:
        found = []
        for path, count, request in requests:
            answer = client.post(path, json=request).raise_for_status().json()
            counted = client.post(count, json=request).raise_for_status().json()
            usage = answer["usage"]
            n_prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
            (said,) = answer["content"] if "content" in answer else answer["output"][0]["content"]
            found.append((path, said["text"], n_prompt, counted["input_tokens"]))
        return found

    with reference(pair) as client:
        theirs = answers(client)
    with served_model(pair.model, mmproj=str(pair.projector), **OURS) as ours:
        assert answers(ours.client) == theirs
