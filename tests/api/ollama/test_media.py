"""Images in Ollama's API, sent by its client."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.support.media_files import image_file
from tests.support.ollama_api import use_ollama
from tests.support.projectors import WordProjector
from tests.support.scripts import answering, noting

PNG = image_file(size=(8, 4))


def shown(*images: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "What?", "images": list(images)}]


@pytest.mark.system
async def test_images_from_files_bytes_and_base64(tmp_path: Path) -> None:
    backend, prompts = noting("A cat.", projector=WordProjector())
    file = tmp_path / "cat.png"
    file.write_bytes(PNG)
    images = [file, PNG, b64encode(PNG).decode()]

    def use(client: ollama.Client) -> None:
        assert client.chat("m", messages=shown(*images)).message.content == "A cat."
        parts = client.chat("m", messages=shown(*images), stream=True)
        assert "".join(part.message.content or "" for part in parts) == "A cat."
        assert client.generate("m", "What?", images=images).response == "A cat."
        assert client.generate("m", images=images[:1]).response == "A cat."

    await use_ollama(backend, use)
    *prompts, last = prompts
    assert all("(image 8x4)(image 8x4)(image 8x4)What?" in prompt for prompt in prompts)
    assert "(image 8x4)" in last


@pytest.mark.parametrize(
    ("projector", "more"),
    [
        (WordProjector(), ["vision", "audio"]),
        (WordProjector(hears=False), ["vision"]),
    ],
)
async def test_capabilities_list_the_modalities(projector: WordProjector, more: list[str]) -> None:
    def use(client: ollama.Client) -> None:
        assert client.show("scripted").capabilities == ["completion", "tools", "thinking", *more]

    await use_ollama(answering("A cat.", projector=projector), use)


@pytest.mark.parametrize(
    ("image", "sees", "problem"),
    [
        (PNG, False, "image input is not supported"),
        (b"no image", True, "images[0]'"),
        (b"", True, "images[0]' is empty."),
    ],
)
async def test_errors_are_those_of_the_client(image: bytes, sees: bool, problem: str) -> None:
    def use(client: ollama.Client) -> None:
        for send in (
            lambda: client.chat("m", messages=shown(image)),
            lambda: list(client.chat("m", messages=shown(image), stream=True)),
            lambda: client.generate("m", "What?", images=[image]),
        ):
            with pytest.raises(ollama.ResponseError) as caught:
                send()
            assert caught.value.status_code == 400
            assert problem in caught.value.error

    await use_ollama(answering("A cat.", projector=WordProjector(sees=sees)), use)
