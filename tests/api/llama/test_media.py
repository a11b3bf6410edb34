"""Images and sound on llama-server's own routes."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import httpx
import pytest

from tests.support.clients import client_of
from tests.support.media_files import image_file, wav_file
from tests.support.projectors import WordProjector
from tests.support.scripts import noting
from trioserve.testing import ScriptedBackend, ScriptedProjector

pytestmark = pytest.mark.system

PNG = b64encode(image_file(size=(8, 4))).decode()
WAV = b64encode(wav_file(0.5)).decode()


def seeing(**settings: Any) -> tuple[ScriptedBackend, list[str]]:
    return noting("A cat.", projector=WordProjector(), **settings)


async def marker_of(client: httpx.AsyncClient) -> str:
    return str((await client.get("/props")).json()["media_marker"])


async def test_a_prompt_with_media() -> None:
    backend, prompts = seeing()
    async with client_of(backend) as client:
        marker = await marker_of(client)
        prompt = {"prompt_string": f"See {marker}, hear {marker}.", "multimodal_data": [PNG, WAV]}
        answer = (await client.post("/completion", json={"prompt": [prompt, "Text"]})).json()
        assert [one["content"] for one in answer] == ["A cat.", "A cat."]
        assert [one["prompt"] for one in answer] == prompts
        openai = await client.post("/v1/completions", json={"prompt": prompt, "echo": True})
        assert openai.json()["choices"][0]["text"] == f"{prompts[0]}A cat."
    assert prompts[0] == prompts[2] == "See (image 8x4), hear (sound 0.5s)."


async def test_tokens_of_media_are_counted() -> None:
    backend, _ = noting("A cat.", projector=ScriptedProjector(n_cells=10))
    async with client_of(backend) as client:
        marker = await marker_of(client)
        prompt = {"prompt_string": f"ab{marker}cd", "multimodal_data": [PNG]}
        body = {"prompt": prompt, "n_predict": 2}
        answer = (await client.post("/completion", json=body)).json()
        assert answer["tokens_evaluated"] == 14
        assert answer["timings"]["prompt_n"] == 14
        assert answer["prompt"] == "ab[image]cd"
        again = (await client.post("/completion", json=body)).json()
        assert again["timings"]["cache_n"] >= 12
        (slot, _) = (await client.get("/slots")).json()
        assert slot["n_prompt_tokens"] >= 14


async def test_a_rendered_chat_can_be_continued() -> None:
    backend, prompts = seeing()
    image = {"type": "image_url", "image_url": {"url": PNG}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]
    async with client_of(backend) as client:
        rendered = (await client.post("/apply-template", json={"messages": messages})).json()
        prompt = {"prompt_string": rendered["prompt"], "multimodal_data": [PNG]}
        await client.post("/completion", json={"prompt": prompt})
        await client.post("/v1/chat/completions", json={"messages": messages})
    assert prompts[0] == prompts[1]
    assert "(image 8x4)?" in prompts[0]


async def test_a_refusal_names_the_parameter() -> None:
    backend, _ = seeing()
    async with client_of(backend) as client:
        marker = await marker_of(client)
        for prompt, param in (
            ({"prompt_string": "no marker", "multimodal_data": [PNG]}, "prompt.prompt_string"),
            ({"prompt_string": marker, "multimodal_data": ["?!"]}, "prompt.multimodal_data[0]"),
            ({"prompt_string": marker, "multimodal_data": ["AAAA"]}, "prompt.multimodal_data[0]"),
            ({"prompt_string": marker, "multimodal_data": []}, "prompt.prompt_string"),
            ({"multimodal_data": [PNG]}, "prompt"),
            ({"prompt_string": marker, "multimodal_data": PNG}, "prompt"),
            (["a", {"prompt_string": "", "multimodal_data": [1]}], "prompt[1].multimodal_data[0]"),
        ):
            answer = await client.post("/completion", json={"prompt": prompt})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        mixed = {"prompt_string": marker, "multimodal_data": [PNG]}
        answer = await client.post("/v1/completions", json={"prompt": mixed, "suffix": "b"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
        answer = await client.post("/tokenize", json={"content": mixed})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content")


async def test_properties_list_the_modalities() -> None:
    for projector, modalities, names in (
        (None, {"vision": False, "video": False, "audio": False}, ["text"]),
        (
            ScriptedProjector(hears=False),
            {"vision": True, "video": True, "audio": False},
            ["text", "image"],
        ),
        (
            ScriptedProjector(sees=False),
            {"vision": False, "video": False, "audio": True},
            ["text", "audio"],
        ),
    ):
        async with client_of(ScriptedBackend(projector=projector)) as client:
            assert (await client.get("/props")).json()["modalities"] == modalities
            listed = (await client.get("/v1/models")).json()
        assert listed["data"][0]["architecture"]["input_modalities"] == names
        capabilities = ["completion", "multimodal"] if projector else ["completion"]
        assert listed["models"][0]["capabilities"] == capabilities
