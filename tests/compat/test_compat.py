"""The comparison with llama-server: what is drawn, and what counts as a difference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compat import run as compat
from tests.compat.calls import Call, draw
from tests.compat.diff import MISSING, Difference, assemble, differences, events_in
from tests.compat.known import KNOWN


def test_the_same_seed_draws_the_same_requests() -> None:
    first, again, other = (list(draw(60, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 60
    paths = {call.path.removeprefix("/v1") for call in first}
    assert {"/completion", "/completions", "/chat/completions", "/infill", "/tokenize"} <= paths


@pytest.mark.parametrize(
    ("ours", "theirs", "paths"),
    [
        ({"a": [1, 2.0], "b": None}, {"a": [1, 2], "b": None}, []),
        ({"a": 0.1}, {"a": 0.10000000149}, []),
        ({"a": 1}, {"a": True}, ["/a"]),
        ({"a": 1}, {}, ["/a"]),
        ({}, {"a": {"b": 1}}, ["/a"]),
        ([1, 2], [1], ["/"]),
        ({"a": [{"b": "x"}]}, {"a": [{"b": "y"}]}, ["/a/0/b"]),
        ({"logprob": -1.0}, {"logprob": -1.01}, []),
        ({"logprob": -1.0}, {"logprob": -1.2}, ["/logprob"]),
    ],
)
def test_differences_have_paths(ours: Any, theirs: Any, paths: list[str]) -> None:
    assert [each.path for each in differences(ours, theirs)] == paths
    assert [each.path for each in differences(theirs, ours)] == paths


def stream(*events: Any) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def chunk(index: int = 0, reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason}], "id": "x"}


def test_it_does_not_matter_where_a_chat_is_cut() -> None:
    whole = [chunk(role="assistant", content=None), chunk(content="Hello"), chunk(reason="stop")]
    cut = [whole[0], chunk(content="He"), chunk(content="l"), chunk(content="lo"), whole[2]]
    a, b = (assemble(events_in(stream(*events))) for events in (whole, cut))
    assert a == b
    assert a["done"] is True
    assert a["outputs"]["0"]["content"] == "Hello"
    assert a["outputs"]["0"]["finish_reason"] == "stop"


def test_the_calls_of_a_streamed_chat_are_put_together() -> None:
    parts = [
        {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    put = assemble([chunk(tool_calls=[part]) for part in parts])
    assert put["outputs"]["0"]["tool_calls"] == {"0": {"name": "f", "arguments": '{"a": 1}'}}


def test_the_outputs_of_a_stream_are_told_apart() -> None:
    def part(index: int, text: str, **more: Any) -> dict[str, Any]:
        return {"index": index, "content": text, "tokens": [len(text)], "stop": False} | more

    last = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "eos"}
    put = assemble([part(0, "a"), part(1, "b"), part(0, "cd"), last, "odd"])
    assert put["outputs"]["0"]["content"] == "acd"
    assert put["outputs"]["0"]["tokens"] == [1, 2]
    assert put["outputs"]["0"]["last"]["stop_type"] == "eos"
    assert put["outputs"]["1"]["content"] == "b"
    assert put["rest"] == ["odd"]


CHAT = Call("chat", "POST", "/v1/chat/completions", {"messages": [], "n": 2})


@pytest.mark.parametrize(
    ("call", "difference", "is_known"),
    [
        (CHAT, Difference("/body/id", "a", "b"), True),
        (CHAT, Difference("/body/timings/prompt_ms", 1, 2), True),
        (CHAT, Difference("/body/choices/0/message/content", "a", "b"), True),  # two choices
        (
            Call("chat", "POST", "/chat/completions", {}),
            Difference("/body/choices/0/message/content", "a", "b"),
            False,
        ),
        (
            Call("chat", "POST", "/chat/completions", {}),
            Difference("/body/choices/0/message/reasoning_content", "a", "a\n"),
            True,
        ),
        (CHAT, Difference("/status", 200, 500), False),
        (CHAT, Difference("/body/object", "chat", MISSING), False),
        (Call("not JSON", "POST", "/completion", b"{"), Difference("/status", 400, 500), True),
    ],
)
def test_what_is_known(call: Call, difference: Difference, is_known: bool) -> None:
    assert any(each.covers(call, difference) for each in KNOWN) is is_known


def test_the_command_line_wants_two_servers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    for arguments in ([], ["--trioserve-url", "http://127.0.0.1:1"]):
        with pytest.raises(SystemExit):
            compat.parse(arguments)
    assert "llama-server" in capsys.readouterr().err
    urls = ["--trioserve-url", "http://127.0.0.1:1", "--llama-server-url", "http://127.0.0.1:2"]
    with compat.pair_of(compat.parse(urls)) as pair:
        assert (pair.ours.address.port, pair.theirs.address.port) == (1, 2)
    assert compat.main([*urls, "--requests", "1"]) == 2  # nobody answers
