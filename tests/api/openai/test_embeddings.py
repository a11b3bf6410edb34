"""The routes for embeddings over a real socket: OpenAI's form and its SDK, llama-server's form."""

from __future__ import annotations

import base64
import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import trio

from tests.support.clients import client_of, client_of_app, error_body
from tests.support.gguf_models import CLS, SEP, WIDTH, Bert, write_bert
from tests.support.http_server import serving
from tests.support.media_files import image_file
from tests.support.media_models import write_pair
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.waiting import until
from trioserve.app import create_app
from trioserve.chat.markers import media_marker
from trioserve.config import Config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Bert:
    return write_bert(tmp_path_factory.mktemp("models") / "mean.gguf")


def client_of_model(path: Path, **config: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return client_of_app(create_app(Config(model=str(path), embeddings=True, threads=1, **config)))


async def test_the_openai_sdk(model: Bert) -> None:
    async with client_of_model(model.path) as client:

        def ask() -> None:
            sdk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=0)
            texts = ["the cat", "what is a panda?"]
            packed = sdk.embeddings.create(model="m", input=texts)  # base64 on the wire
            plain = sdk.embeddings.create(model="m", input=texts, encoding_format="float")
            assert [one.index for one in packed.data] == [0, 1]
            assert packed.usage.prompt_tokens == packed.usage.total_tokens == 4 + 7
            assert packed.model == model.path.name and packed.object == "list"
            for one, other in zip(packed.data, plain.data, strict=True):
                assert one.object == "embedding" and len(one.embedding) == WIDTH
                assert one.embedding == pytest.approx(other.embedding, abs=1e-4)
            short = sdk.embeddings.create(model="m", input=texts[0], dimensions=4)
            assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1)
            head = np.array(plain.data[0].embedding[:4])
            assert short.data[0].embedding == pytest.approx(head / np.linalg.norm(head), abs=1e-4)
            tokens = sdk.embeddings.create(model="m", input=[[CLS, 5, 6, SEP], [CLS, SEP]])
            assert tokens.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-4)
            long: Any = {"input": ["the cat", "the cat " * 90], "encoding_format": "float"}
            with pytest.raises(openai.BadRequestError, match="is too large"):
                sdk.embeddings.create(model="m", **long)
            cut = sdk.embeddings.create(
                model="m", extra_body={"truncate_prompt_tokens": -1}, **long
            )
            assert cut.usage.prompt_tokens == 4 + 64
            cut = sdk.embeddings.create(model="m", extra_body={"truncate_prompt_tokens": 4}, **long)
            assert cut.data[1].embedding == pytest.approx(plain.data[0].embedding, abs=1e-4)
            with pytest.raises(openai.BadRequestError, match="at least 1"):
                sdk.embeddings.create(model="m", input="a", dimensions=0)

        await trio.to_thread.run_sync(ask)


SAME_AS_THE_CAT: list[Any] = [
    [CLS, 5, 6, SEP],
    [[CLS, 5, 6, SEP], "mat"],
    {"prompt_string": "the cat"},
    [{"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]}],
]


async def test_forms_of_an_input(model: Bert) -> None:
    async with client_of_model(model.path, flash_attn="off") as client:
        same = (await client.post("/v1/embeddings", json={"input": "the cat"})).json()
        assert same["model"] == "mean.gguf"
        wanted = same["data"][0]["embedding"]
        for value in SAME_AS_THE_CAT:
            body = (await client.post("/v1/embeddings", json={"input": value})).json()
            assert body["data"][0]["embedding"] == pytest.approx(wanted, abs=1e-4), value
        mixed = (await client.post("/v1/embeddings", json={"input": ["the cat", 3]})).json()
        # One text, with a second SEP.
        assert mixed["usage"]["prompt_tokens"] == 5 and len(mixed["data"]) == 1


async def test_llama_servers_own_form_and_base64(model: Bert) -> None:
    async with client_of_model(model.path) as client:
        wanted = (await client.post("/v1/embeddings", json={"input": ["cat", "dog"]})).json()
        for path, name in (
            ("/embedding", "content"),
            ("/embeddings", "input"),
            ("/v1/embeddings", "content"),
        ):
            answer = await client.post(path, json={name: ["cat", "dog"]})
            assert [set(one) for one in answer.json()] == [{"index", "embedding"}] * 2
            assert [one["index"] for one in answer.json()] == [0, 1]
            for own, one in zip(answer.json(), wanted["data"], strict=True):
                assert own["embedding"] == [pytest.approx(one["embedding"], abs=1e-6)]
        answers = [
            await client.post("/v1/embeddings", json={"input": "cat", "encoding_format": form})
            for form in ("float", "base64")
        ]
        plain, packed = (answer.json()["data"][0] for answer in answers)
        assert packed["encoding_format"] == "base64"
        decoded = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
        np.testing.assert_array_equal(decoded, np.array(plain["embedding"], np.float32))
        raw = (
            await client.post("/embedding", json={"content": "cat", "embd_normalize": -1})
        ).json()
        first = np.array(raw[0]["embedding"][0])
        one = np.array(wanted["data"][0]["embedding"])
        np.testing.assert_allclose(first / np.linalg.norm(first), one, atol=1e-4)


async def test_a_vector_for_each_token(model: Bert) -> None:
    async with client_of_model(model.path, pooling="none") as client:
        answer = (await client.post("/embedding", json={"content": ["the cat", ""]})).json()
        assert [np.array(one["embedding"]).shape for one in answer] == [(4, WIDTH), (2, WIDTH)]
        refused = await client.post("/v1/embeddings", json={"input": "cat"})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            "This server makes a vector of each token, because its pooling is 'none', and this "
            "route has one for each text. POST /embeddings gives them."
        )
        for name, value in (("embd_normalize", 2), ("dimensions", 4)):
            refused = await client.post("/embedding", json={"content": "cat", name: value})
            message = "Embeddings of single tokens are neither cut nor normalized."
            assert (refused.status_code, refused.json()) == (400, error_body(message, name))


async def test_many_inputs_in_one_request(model: Bert) -> None:
    """More than any batch holds, and more than is written on the event loop."""
    async with client_of_model(model.path, ubatch_size=64) as client:
        body = {"input": ["the cat"] * 700, "encoding_format": "float"}
        answer = (await client.post("/v1/embeddings", json=body)).json()
        assert [one["index"] for one in answer["data"]] == list(range(700))
        assert answer["usage"] == {"prompt_tokens": 2800, "total_tokens": 2800}
        own = (await client.post("/embeddings", json=body)).json()
        assert len(own) == 700 and len(own[699]["embedding"][0]) == WIDTH


_FORMS = (
    "a string, a list of token ids, a list of ids and strings, an object with a list as "
    "'content', or a list of these"
)


MADE_OF = "made of parts of the types text, image_url, input_audio and video_url."
UNKNOWN = "'input[1]' has an unknown token, 9999: token ids run from 0 to 95."
NO_IMAGES = (
    "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
)
INPUT: list[tuple[Any, str, str]] = [
    (5, f"'input' must be {_FORMS}.", "input"),
    ([None], f"'input' must be {_FORMS}.", "input"),
    ([], f"'input' must be {_FORMS}, and not empty.", "input"),
    ([[]], "'input' has no tokens.", "input"),
    (["a", []], "'input[1]' has no tokens.", "input[1]"),
    (["a", [9999]], UNKNOWN, "input[1]"),
    (
        {"prompt_string": "a", "multimodal_data": ["eA=="]},
        "'input.prompt_string' has 0 media markers, and there are 1 media.",
        "input.prompt_string",
    ),
    (
        [{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
        "'input[0].content[1].image_url' is missing.",
        "input[0].content[1].image_url",
    ),
    (
        {"content": [{"type": "image_url", "image_url": "eA=="}]},
        NO_IMAGES,
        "input.content[0].image_url",
    ),
    ({"content": [{"type": "tool"}]}, f"'input' must be {MADE_OF}", "input"),
    ([2, 9999], "'input' has an unknown token, 9999: token ids run from 0 to 95.", "input"),
]
#: Of other fields, with what follows their name in the message.
FIELDS = [
    ("encoding_format", "x", 'must be "float" or "base64".'),
    ("dimensions", 0, "must be at least 1."),
    ("dimensions", 33, "is 33, and the model's embeddings have 32."),
    ("truncate_prompt_tokens", 0, "must be -1 or a positive integer."),
    ("truncate", "MIDDLE", 'must be "NONE", "START" or "END".'),
    ("truncation_side", "top", 'must be "left" or "right".'),
    ("normalize", False, "is not supported with this value; leave it out."),
    ("priority", 101, "must be between -100 and 100."),
    ("embd_normalize", -2, "must be -1, 0 or a positive integer."),
]


async def test_errors_name_the_field(model: Bert) -> None:
    cases: list[tuple[str, Any, str, str]] = [
        ("/v1/embeddings", {}, "'input' or 'content' must be provided.", "input"),
        *(("/v1/embeddings", {"input": value}, *problem) for value, *problem in INPUT),
        *(
            ("/v1/embeddings", {"input": "a", name: value}, f"'{name}' {problem}", name)
            for name, value, problem in FIELDS
        ),
        (
            "/embeddings",
            {"input": "a", "encoding_format": "base64"},
            "'encoding_format' base64 is for OpenAI's form, with 'input'.",
            "encoding_format",
        ),
    ]
    async with client_of_model(model.path) as client:
        for path, body, message, param in cases:
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()) == (400, error_body(message, param))
        late = {"X-Request-Timeout": "0.000001"}
        for path in ("/v1/embeddings", "/embedding"):
            answer = await client.post(path, json={"input": "a"}, headers=late)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"


async def test_a_text_that_is_too_long_names_the_flag(model: Bert) -> None:
    async with client_of_model(model.path, ubatch_size=16) as client:
        answer = await client.post("/v1/embeddings", json={"input": "cat " * 20})
        assert answer.status_code == 400
        assert answer.json() == error_body(
            "'input' is too large: a text of 22 tokens, and this model takes a text as a whole, of "
            "at most 16 tokens; --ubatch-size raises that, with --batch-size where that is "
            "smaller.",
            "input",
            code="context_length_exceeded",
            type="exceed_context_size_error",
            n_prompt_tokens=22,
            n_ctx=16,
        )


TEXT_ONLY = (
    "This server does not support embeddings. Start it with `--embeddings`, or without "
    "`--embd-ctx-size 0`"
)
VECTORS_ONLY = (
    "This server computes embeddings and generates no text. "
    "Start it without `--embeddings` and `--reranking`"
)


async def test_a_server_for_text_has_no_embeddings() -> None:
    async with client_of() as client:
        for path in ("/v1/embeddings", "/embeddings", "/embedding"):
            answer = await client.post(path, json={"input": {"no": "text"}})
            assert (answer.status_code, answer.json()) == (
                501,
                error_body(TEXT_ONLY, None, status=501),
            )
            # It names no model; a server may have several.
            answer = await client.post(path, content=b"not even JSON")
            assert answer.status_code == 400


async def test_a_server_for_embeddings_makes_no_text(model: Bert) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    async with client_of_model(model.path, metrics_endpoint=True) as client:
        for path, body in (
            ("/completion", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"stream": True}),
        ):
            answer = await client.post(path, json=body)
            wanted = error_body(VECTORS_ONLY, None, status=501)
            assert (answer.status_code, answer.json()) == (501, wanted)
        for path in ("/health", "/health/live", "/props", "/slots", "/v1/models", "/metrics"):
            assert (await client.get(path)).status_code == 200
        answer = await client.post("/tokenize", json={"content": "the cat", "add_special": True})
        assert answer.json() == {"tokens": [CLS, 5, 6, SEP]}


async def test_a_client_that_leaves_frees_the_engine() -> None:
    class Slow(ScriptedEmbedder):
        def compute(self) -> None:
            super().compute()
            time.sleep(0.002)

    backend = Slow()
    app = create_app(Config(embeddings=True), load=lambda _config, progress=None: backend)
    service = app.extensions["trioserve"]
    async with serving(app) as url:
        await service.wait_loaded()
        body = {"input": [[1] * 16] * 2000}
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as client,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(partial(client.post, "/embeddings", json=body))
            await until(lambda: backend.batches)
            nursery.cancel_scope.cancel()
        await until(lambda: not len(service.server.lifecycle.services.dispatcher))
        assert (await service.server.status()).slots[0].state == "idle"
        assert len(backend.batches) < 2000


@pytest.mark.system
async def test_images_in_all_forms(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "mlp")
    image = base64.b64encode(image_file(size=(60, 60))).decode()
    marker = media_marker()
    own = {"prompt_string": f"It is {marker}.", "multimodal_data": [image]}
    text = {"type": "text", "text": "It is "}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    parts = {"content": [text, url, {"type": "text", "text": "."}]}
    async with client_of_model(
        pair.model, mmproj=str(pair.projector), pooling="mean", ctx_size=512
    ) as client:
        modalities = (await client.get("/props")).json()["modalities"]
        assert modalities["vision"] and not modalities["audio"]
        answer = await client.post("/v1/embeddings", json={"input": [own, parts, "It is ."]})
        one, same, plain = (each["embedding"] for each in answer.json()["data"])
        assert one == pytest.approx(same, abs=1e-5) and one != pytest.approx(plain, abs=1e-2)
        assert answer.json()["usage"]["prompt_tokens"] > 2 * 16
        (alone,) = (await client.post("/embeddings", json={"content": own})).json()
        assert alone["embedding"][0] == pytest.approx(one, abs=1e-5)
        broken = {**own, "multimodal_data": [base64.b64encode(b"no image").decode()]}
        refused = await client.post("/v1/embeddings", json={"input": [own, broken]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[1].multimodal_data[0]"
