"""llama-server's own routes on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clients import client_of, events_in
from trioserve.testing.vocab import byte_vocab


async def test_text_to_tokens_and_back() -> None:
    async with client_of() as client:

        async def post(path: str, **body: Any) -> Any:
            return (await client.post(path, json=body)).json()

        assert await post("/tokenize", content="ab") == {"tokens": [97, 98]}
        assert await post("/tokenize", content=[1, "a"]) == {"tokens": [1, 97]}
        assert await post("/tokenize") == {"tokens": []}
        assert await post("/tokenize", content="é", with_pieces=True) == {
            "tokens": [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
        }
        written = await post("/detokenize", tokens=[195, 169, 97])
        assert written == {"content": "éa", "prompt": "éa"}  # as llama-server, and as vLLM
        assert (await post("/detokenize"))["content"] == ""
        rendered = await post("/apply-template", messages=[{"role": "user", "content": "Hi"}])
        assert "user\nHi" in rendered["prompt"]
        long = "x" * 100_000  # which is rendered in a thread
        rendered = await post("/apply-template", messages=[{"role": "user", "content": long}])
        assert f"user\n{long}" in rendered["prompt"]


async def test_a_whole_completion() -> None:
    body = {"prompt": "a\nbc", "n_predict": 3, "return_tokens": True, "n_probs": 1, "seed": 7}
    async with client_of() as client:
        data = (await client.post("/completion", json=body)).json()
        other = (await client.post("/completions", json=body)).json()
    assert data["content"] == other["content"] == "A\nB"
    assert data["tokens"] == list(b"A\nB")
    assert data["prompt"] == "a\nbc"
    assert data["has_new_line"] is True
    assert data["stop"] is True
    assert data["stop_type"] == "limit"
    assert data["stopping_word"] == ""
    assert data["tokens_predicted"] == 3
    assert data["tokens_evaluated"] == 4
    assert data["tokens_cached"] == 6
    assert data["truncated"] is False
    assert data["id_slot"] in (0, 1)
    assert data["index"] == 0
    assert data["generation_settings"]["seed"] == 7
    assert data["generation_settings"]["n_predict"] == 3
    assert [each["token"] for each in data["completion_probabilities"]] == ["A", "\n", "B"]
    timings = data["timings"]
    assert timings["prompt_n"] == 4
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 2)


async def test_probabilities_after_sampling_have_other_names() -> None:
    body = {"prompt": "a", "n_probs": 1, "post_sampling_probs": True}
    async with client_of() as client:
        data = (await client.post("/completion", json=body)).json()
    (first, *_) = data["completion_probabilities"]
    assert first["prob"] == 1.0
    assert first["top_probs"][0]["prob"] == 1.0


async def test_stop_words_and_defaults_of_the_configuration() -> None:
    async with client_of(n_predict=2) as client:
        data = (await client.post("/completion", json={"prompt": "abcd", "stop": "B"})).json()
        assert (data["content"], data["stop_type"], data["stopping_word"]) == ("A", "word", "B")
        assert data["tokens"] == []
        data = (await client.post("/completion", json={"prompt": "abcd"})).json()
        assert data["content"] == "AB"


async def test_a_streamed_completion() -> None:
    body = {"prompt": "a\nb", "stream": True, "return_progress": True, "timings_per_token": True}
    async with client_of() as client:
        answer = await client.post("/completion", json=body)
    *parts, last = events_in(answer.text, done=False)
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    wanted = {"total": 3, "cache": 0, "processed": 3, "time_ms": progress[-1]["time_ms"]}
    assert progress[-1] == wanted
    assert "".join(part["content"] for part in parts) == "A\nB"
    assert all(part["stop"] is False and part["tokens_evaluated"] == 3 for part in parts)
    assert [token for part in parts for token in part["tokens"]][:3] == list(b"A\nB")
    assert "timings" in parts[-1]
    assert parts[0]["timings"]["prompt_n"] == parts[0]["timings"]["prompt_ms"] == 0
    assert parts[0]["prompt_progress"]["processed"] == 0
    assert last["content"] == ""
    assert last["stop"] is True
    assert last["stop_type"] == "eos"
    assert last["has_new_line"] is True
    assert last["timings"]["predicted_n"] == 4


async def test_ignore_eos_bans_the_end_tokens() -> None:
    forbidden = [{"bias": None, "token": token} for token in sorted(byte_vocab.end_of_generation)]
    assert forbidden
    async with client_of() as client:
        for ignore_eos, told in ((True, forbidden), (False, [])):
            body = {
                "prompt": "a",
                "n_predict": 1,
                "ignore_eos": ignore_eos,
                "logit_bias": [[65, 2]],
            }
            data = (await client.post("/completion", json=body)).json()
            biases = data["generation_settings"]["logit_bias"]
            assert biases == [{"bias": 2.0, "token": 65}, *told]


async def test_with_candidates_an_event_is_a_token() -> None:
    body = {"prompt": "abcdef", "stream": True, "n_probs": 2}
    async with client_of() as client:
        answer = await client.post("/completion", json=body)
    parts = [part for part in events_in(answer.text, done=False) if part["content"]]
    assert [len(part["completion_probabilities"]) for part in parts] == [1] * 6


async def test_several_prompts_give_a_list() -> None:
    body = {
        "prompt": ["ab", {"prompt_string": "cd"}],
        "response_fields": ["content", "index", "generation_settings/top_k", "nothing/there"],
    }
    async with client_of() as client:
        data = (await client.post("/completion", json=body)).json()
        streamed = await client.post("/completion", json=body | {"stream": True})
    assert data == [
        {"content": "AB", "index": 0, "generation_settings/top_k": 40},
        {"content": "CD", "index": 1, "generation_settings/top_k": 40},
    ]
    texts = {0: "", 1: ""}
    for event in events_in(streamed.text, done=False):
        texts[event["index"]] += event["content"]
    assert texts == {0: "AB", 1: "CD"}


async def test_bad_requests_name_the_field() -> None:
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": [999]}, "prompt"),
        ("/completion", {"prompt": ""}, "prompt"),
        ("/completion", {"prompt": "a", "id_slot": 99}, "id_slot"),
        ("/completion", {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        ("/completion", {"prompt": "a", "echo": True}, "echo"),
        ("/completion", {"prompt": "a", "n_indent": -4}, "n_indent"),
        ("/tokenize", {"content": [999]}, "content"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/apply-template", {}, "messages"),
    ]
    async with client_of() as client:
        for path, body, param in requests:
            answer = await client.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, 400)
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
        error = (await client.post("/completion", json={"prompt": "x" * 3000})).json()["error"]
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (3000, 1024)
        assert (await client.get("/health")).status_code == 200


async def test_text_biases_are_tokenized() -> None:
    body = {"prompt": "a", "logit_bias": [["hé", -1], [5, False]]}
    async with client_of() as client:
        data = (await client.post("/completion", json=body)).json()
    biases = data["generation_settings"]["logit_bias"]
    assert [bias["token"] for bias in biases] == [*"hé".encode(), 5]
    assert biases[-1]["bias"] is None
