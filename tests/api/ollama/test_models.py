"""Ollama's descriptions of the model, and its names."""

from __future__ import annotations

import datetime
from typing import Any

import attrs
import ollama
import pytest
from msgspec import to_builtins

from tests.support.clients import client_of
from tests.support.ollama_api import use_ollama
from tests.support.scripts import answering
from tests.support.served_model import served_model
from trioserve._version import __version__
from trioserve.api.base.models import Card, Details, Loaded
from trioserve.api.ollama import models
from trioserve.api.ollama.models import digest, human_number, quantization_name
from trioserve.models import BUNDLED
from trioserve.types import GenerationParams

GEMMA = Card(
    name="gemma",
    size=5000,
    modified=1e9,
    architecture="gemma3",
    n_params=4_300_000_000,
    quantization="Q4_K_M",
)
DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "gemma3",
    "families": ["gemma3"],
    "parameter_size": "4.3B",
    "quantization_level": "Q4_K_M",
}
HEAD = {
    "name": "gemma",
    "model": "gemma",
    "size": 5000,
    "digest": digest(GEMMA),
    "details": DETAILS,
}


def test_models_are_listed_newest_first() -> None:
    newer = attrs.evolve(GEMMA, name="newer", modified=2e9)
    first, second = to_builtins(models.describe_tags([GEMMA, newer]))["models"]
    assert second == {**HEAD, "modified_at": "2001-09-09T01:46:40Z"}
    assert (first["name"], first["modified_at"]) == ("newer", "2033-05-18T03:33:20Z")


def test_loaded_models_say_until_when() -> None:
    given = [Loaded(card=GEMMA, n_ctx=4096), Loaded(card=GEMMA, n_ctx=1, expires=1e9)]
    first, second = to_builtins(models.describe_processes(given))["models"]
    assert first == {**HEAD, "expires_at": "2318-01-01T00:00:00Z", "context_length": 4096}
    assert second["expires_at"] == "2001-09-09T01:46:40Z"


def test_the_digest_tells_files_apart() -> None:
    others = [attrs.evolve(GEMMA, name="b"), attrs.evolve(GEMMA, modified=2)]
    digests = {digest(one) for one in (GEMMA, *others)}
    assert len(digests) == 3
    assert all(len(each) == 64 for each in digests)  # clients show the first twelve letters
    # A router knows the time to the nanosecond, and the size of the file, not of its tensors.
    assert digest(attrs.evolve(GEMMA, size=1, modified=1e9 + 0.5)) == digest(GEMMA)


def test_a_model_is_shown() -> None:
    metadata = {
        "general.architecture": "gemma3",
        "general.name": "Gemma",
        "general.license": "gemma",
        "general.version": "1.0",
        "general.file_type": "15",
        "gemma3.context_length": "32768",
        "gemma3.rope.freq_base": "1000000.000000",
        "gemma3.rope.scaling.type": "linear",
        "tokenizer.ggml.add_bos_token": "true",
        "tokenizer.ggml.tokens": 262144,
        "tokenizer.chat_template": "{{ x }}",
    }
    shown = models.describe_model(
        Details(
            card=GEMMA,
            path="/m.gguf",
            template="{{ x }}",
            metadata=metadata,
            defaults=GenerationParams(stop=("a", "b")),
            n_ctx=4096,
            abilities=["completion", "tools"],
        )
    )
    parameters = shown.parameters.splitlines()
    assert parameters[0] == f"{'num_ctx':<30} 4096"
    assert parameters[-2:] == [f'{"stop":<30} "a"', f'{"stop":<30} "b"']
    assert to_builtins(shown) == {
        "license": "gemma",
        "modelfile": "FROM /m.gguf\n",
        "parameters": shown.parameters,
        "template": "{{ x }}",
        "details": DETAILS,
        "model_info": {
            "general.architecture": "gemma3",
            "general.license": "gemma",
            "general.version": "1.0",
            "general.file_type": 15,
            "general.parameter_count": 4_300_000_000,
            "gemma3.context_length": 32768,
            "gemma3.rope.freq_base": 1e6,
            "gemma3.rope.scaling.type": "linear",
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.tokens": 262144,
        },
        "capabilities": ["completion", "tools"],
        "modified_at": "2001-09-09T01:46:40Z",
        "context_length": 4096,
        "max_model_len": 4096,
    }


def test_numbers_of_parameters() -> None:
    numbers = [0, 999, 1500, 3_000_000, 268_100_000, 7 * 10**9]
    assert [human_number(n) for n in numbers] == ["0", "999", "1.5K", "3M", "268.1M", "7B"]


def test_types_of_files_have_their_usual_names() -> None:
    names = {
        "Q4_K - Medium": "Q4_K_M",
        "Q2_K - Medium": "Q2_K",
        "Q2_K - Small": "Q2_K_S",
        "Q8_0": "Q8_0",
        "all F32": "F32",
        "MXFP4 MoE": "MXFP4",
        "IQ2_XXS - 2.0625 bpw": "IQ2_XXS",
        "Q4_K - Medium (guessed)": "Q4_K_M",
        "": "",
    }
    assert {ftype: quantization_name(ftype) for ftype in names} == names


async def test_the_client_sees_the_one_model() -> None:
    def use(client: ollama.Client) -> None:
        (listed,) = client.list().models
        (running,) = client.ps().models
        assert listed.model == running.model == "scripted"
        assert listed.digest == running.digest
        assert running.context_length == 4096
        assert running.expires_at is not None
        assert running.expires_at.year - datetime.datetime.now().year > 20  # "Forever"
        assert client.show("scripted").capabilities == ["completion", "tools", "thinking"]
        with pytest.raises(ollama.ResponseError, match="'trioserve pull'") as caught:
            client.pull("gemma")
        assert caught.value.status_code == 501

    await use_ollama(answering("Hi"), use)


async def test_names_the_tag_latest_and_the_version() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with client_of(answering("Hi", chat_template=plain), alias="scripted,other") as client:
        for name in ("scripted", "scripted:latest", "other", "other:latest"):
            for field in ("model", "name"):
                answer = await client.post("/api/show", json={field: name})
                assert answer.status_code == 200
                assert answer.json()["capabilities"] == ["completion"]
                assert answer.json()["context_length"] == answer.json()["max_model_len"] > 0
            answer = await client.request("DELETE", "/api/delete", json={"model": name})
            assert answer.status_code == 501
            assert "'trioserve rm'" in answer.json()["error"]
        for wrong in ("scripted:7b", "third", ""):
            answer = await client.post("/api/show", json={"model": wrong})
            assert answer.status_code == 404
            expected = f"There is no model {wrong!r} here. The model is 'scripted'."
            assert answer.json() == {"error": expected}
        for field, value in (("system", "x"), ("options", {"seed": 1})):
            answer = await client.post("/api/show", json={"model": "scripted", field: value})
            assert answer.status_code == 400
            assert f"'{field}'" in answer.json()["error"]
        answer = await client.get("/api/version")
        assert answer.json() == {"version": models.OLLAMA_VERSION, "trioserve": __version__}
        for path in ("/api/version", "/api/tags"):
            assert (await client.head(path)).status_code == 200


def test_a_real_model() -> None:
    with (
        served_model(BUNDLED) as served,
        ollama.Client(host=str(served.client.base_url)) as client,
    ):
        (listed,) = client.list().models
        assert listed.model == "bundled.gguf"
        assert listed.details is not None
        assert listed.details.family == "llama"
        assert listed.details.quantization_level == "Q8_0"
        shown = client.show("bundled.gguf")
        info: Any = shown.modelinfo
        assert info["general.architecture"] == "llama"
        assert isinstance(info["llama.context_length"], int)
        assert info["general.parameter_count"] > 1e6
        assert shown.modelfile == f"FROM {BUNDLED}\n"
        options = {"num_predict": 5, "temperature": 0, "num_ctx": 1024}
        asked = client.chat("any", [{"role": "user", "content": "Say hello"}], options=options)
        assert asked.eval_count == 5
