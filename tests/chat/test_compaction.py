"""The split of a conversation into a part to summarize and a part to keep."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioserve.chat.compaction import (
    MAX_FILES,
    Compaction,
    groups_of,
    open_calls,
    transcript,
    without,
)
from trioserve.chat.messages import MAX_MESSAGES, Messages, parse_messages
from trioserve.errors import InvalidRequestError
from trioserve.types import DocumentSource, MediaSource


def said(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def calls(*ids: str) -> dict[str, Any]:
    made = [
        {"id": id_, "type": "function", "function": {"name": f"f{id_}", "arguments": "{}"}}
        for id_ in ids
    ]
    return said("assistant", tool_calls=made)


def result(id_: str) -> dict[str, Any]:
    return said("tool", f"r{id_}", tool_call_id=id_)


@pytest.mark.parametrize(
    ("messages", "sizes"),
    [
        ([said("user"), said("assistant"), said("user")], [1, 1, 1]),
        ([said("user"), calls("1", "2"), result("1"), result("2"), said("user")], [1, 3, 1]),
        # a result that comes late, after others have spoken
        ([calls("1"), said("user"), calls("2"), result("2"), result("1"), said("user")], [5, 1]),
        ([said("user"), result("unknown")], [2]),
        ([result("1"), said("user")], [1, 1]),
        # an id that each turn uses again
        ([calls("1"), result("1"), said("user"), calls("1"), result("1")], [2, 1, 2]),
    ],
)
def test_a_call_is_in_the_group_of_its_result(
    messages: list[dict[str, Any]], sizes: list[int]
) -> None:
    groups = groups_of(messages)
    assert list(map(len, groups)) == sizes
    assert [one for group in groups for one in group] == messages


class Id(str):
    """An id that counts how often it is looked up."""

    n_lookups = 0

    def __hash__(self) -> int:
        Id.n_lookups += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Id.n_lookups += 1
        return super().__eq__(other)


def test_groups_and_open_calls_of_many_messages_take_linear_time() -> None:
    n = MAX_MESSAGES // 2
    ids = [Id(i) for i in range(n)]
    Id.n_lookups = 0
    turns = [one for id_ in ids for one in (calls(id_), said("tool", tool_call_id=id_))]
    assert len(groups_of(turns)) == n
    assert open_calls(turns) == []
    late = [*map(calls, ids), *(said("tool", tool_call_id=id_) for id_ in reversed(ids))]
    assert len(groups_of(late)) == 1
    assert open_calls(late) == []
    assert Id.n_lookups < 50 * n


@pytest.mark.parametrize(
    ("messages", "names", "n_left"),
    [
        ([said("user"), calls("1", "2"), result("1")], [["f2"]], 3),
        ([calls("1"), result("1"), said("user"), calls("1")], [["f1"]], 3),
        ([calls("1"), said("user"), calls("2"), result("2")], [["f1"]], 3),
        ([calls("1"), result("1")], [], 2),
    ],
)
def test_open_calls(messages: list[dict[str, Any]], names: list[list[str]], n_left: int) -> None:
    waiting = open_calls(messages)
    assert [[call["function"]["name"] for call in one["tool_calls"]] for one in waiting] == names
    left = without(messages, waiting)
    assert len(left) == n_left
    assert open_calls(left) == []


def test_what_is_written_is_read() -> None:
    image = {"type": "media", "media": MediaSource(kind="image", data=b"1" * 100, param="x")}
    far = {"type": "media", "media": MediaSource(url="https://example.org/a.wav", kind="audio")}
    pdf = {"type": "document", "document": DocumentSource(data=b"%PDF-1", name="a", about="My.")}
    kept = Messages(
        [said("user", [{"type": "text", "text": "é"}, image, far, pdf]), calls("1"), result("1")]
    )
    written = Compaction(summary="s", kept=kept, spares_users=True).written()
    read = Compaction.read(written, "x")
    assert (read.summary, read.spares_users) == ("s", True)
    text, first, second, about, document = read.kept[0]["content"]
    assert (text["text"], about["text"]) == ("é", "My.")
    assert first["media"].data == b"1" * 100
    assert (second["media"].url, second["media"].kind) == ("https://example.org/a.wav", "audio")
    assert (document["document"].data, document["document"].name) == (b"%PDF-1", "a")
    assert read.kept[1:] == parse_messages([calls("1"), result("1")])


def test_more_than_some_files_become_notes() -> None:
    big = {"type": "media", "media": MediaSource(kind="image", data=b"1" * (MAX_FILES // 2))}
    written = Compaction(summary="s", kept=Messages([said("user", [big, big])])).written()
    assert len(written) < 1.1 * MAX_FILES
    first, second = json.loads(written)["kept"][0]["content"]
    assert first["type"] == "image_url"
    assert second == {"type": "text", "text": "[image]"}


@pytest.mark.parametrize(
    "text", ["", "gAAA", "[]", "1", '{"type": "trioserve.compaction"}', "[" * 100_000, "\ud800"]
)
def test_what_is_no_compaction(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Compaction.read(text, "input[0].encrypted_content")
    assert caught.value.param == "input[0].encrypted_content"


def test_a_transcript_has_no_reasoning() -> None:
    image = {"type": "media", "media": MediaSource(kind="image", data=b"1")}
    messages = [
        said("user", [{"type": "text", "text": "Hi"}, image]),
        said("assistant", "Ah.", reasoning_content="secret"),
        calls("1"),
        said("tool", "r", tool_call_id="1", name="f1"),
    ]
    lines = ["user: Hi\n[image]", "assistant: Ah.", "assistant calls f1: {}", "result of f1: r"]
    assert transcript(messages).split("\n\n") == lines
