"""The clients of all APIs, and a tiny model with random weights that sees and hears."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.support.media_files import image_file, wav_file
from tests.support.media_models import write_pair
from tests.support.served_model import served_model

PNG = image_file(size=(90, 60))
IMAGE, SOUND = b64encode(PNG).decode(), b64encode(wav_file(1.0)).decode()
URL = f"data:image/png;base64,{IMAGE}"
ASK = "What is it?"
SAMPLING: Any = {"temperature": 0.0, "seed": 1}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pair = write_pair(tmp_path_factory.mktemp("models"), "mixed")
    with served_model(pair.model, mmproj=str(pair.projector)) as server:
        yield str(server.client.base_url)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.system
def test_an_image_is_the_same_in_every_api(url: str, client: openai.OpenAI) -> None:
    messages: Any = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": URL}},
                {"type": "text", "text": ASK},
            ],
        }
    ]
    chat = client.chat.completions.create(model="m", messages=messages, max_tokens=8, **SAMPLING)
    parts = client.chat.completions.create(
        model="m", messages=messages, max_tokens=8, stream=True, **SAMPLING
    )
    assert chat.usage is not None
    answer, n_prompt = chat.choices[0].message.content, chat.usage.prompt_tokens
    assert answer
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer

    items: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": URL, "detail": "auto"},
                {"type": "input_text", "text": ASK},
            ],
        }
    ]
    response = client.responses.create(
        model="m", input=items, max_output_tokens=8, extra_body=SAMPLING
    )
    assert response.usage is not None
    assert (response.output_text, response.usage.input_tokens) == (answer, n_prompt)

    source: Any = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": ASK}]
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as other:
        message = other.messages.create(
            model="m",
            max_tokens=8,
            messages=[{"role": "user", "content": content}],
            extra_body=SAMPLING,
        )
    (block,) = message.content
    assert block.type == "text" and block.text == answer
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == n_prompt
    assert cached > 16  # the image is not computed again

    with ollama.Client(host=url, timeout=60) as third:
        said = third.chat(
            "m",
            messages=[{"role": "user", "content": ASK, "images": [PNG]}],
            options={"num_predict": 8, **SAMPLING},
        )
    assert (said.message.content, said.prompt_eval_count) == (answer, n_prompt)


@pytest.mark.system
def test_sound_is_the_same_in_chats_and_responses(client: openai.OpenAI) -> None:
    sound: Any = {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}
    chat = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": [sound]}], max_tokens=8, **SAMPLING
    )
    response = client.responses.create(
        model="m",
        input=[{"role": "user", "content": [sound]}],
        max_output_tokens=8,
        extra_body=SAMPLING,
    )
    assert chat.usage is not None and response.usage is not None
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens > 13


def test_what_is_no_image_is_an_error_of_the_client(client: openai.OpenAI) -> None:
    for url, reason in (
        ("data:image/png;base64,AAAA", "is none of the files"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "is none of the files"),
        ("data:text/html;base64,AAAA", "is of the type 'text/html'"),
        ("https://example.org/cat.png", "without --media-urls"),
        ("file:///etc/passwd", "without --media-path"),
    ):
        content: Any = [{"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": content}]
            )
        assert caught.value.param == "messages[0].content[0].image_url"
