"""Markers in the place of media."""

from __future__ import annotations

import pytest

from trioserve.chat.markers import mark, media_marker, split_at
from trioserve.chat.messages import Messages, media_part, parse_messages
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.types import MediaSource

CAT, DOG, BELL = (
    MediaSource(kind=kind, data=name, param=f"messages[0].content[{i}].{name.decode()}")
    for i, (kind, name) in enumerate([("image", b"cat"), ("image", b"dog"), ("audio", b"bell")])
)


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def messages(*parts: object) -> Messages:
    return parse_messages([{"role": "user", "content": list(parts)}])


def test_text_and_markers_become_one_text() -> None:
    given = messages(text("a"), text("b"))
    marked = mark(given)
    assert (marked.messages, marked.split("rendered")) == (given, ["rendered"])
    given = messages(
        text("a"), text("b"), media_part(CAT), media_part(DOG), text("c"), text(""), text("d")
    )
    marked = mark(given)
    content = marked.messages[0]["content"]
    cat, dog = marked.media
    assert content == f"a\nb{cat}{dog}c\n\nd"
    assert marked.split(f"<user>{content}</user>") == ["<user>a\nb", CAT, DOG, "c\n\nd</user>"]
    assert marked.split(f"{dog}, {cat}, {dog}") == [DOG, ", ", CAT, ", ", DOG]
    with pytest.raises(UnsupportedFieldError) as caught:
        marked.split(f"only {cat}")
    assert caught.value.param == DOG.param


def test_markers_cannot_be_guessed() -> None:
    given = messages(media_part(CAT))
    (first,) = mark(given).media
    marked = mark(messages(text(first), text("<__media__>"), media_part(CAT)))
    (second,) = marked.media
    assert first != second
    content = marked.messages[0]["content"]
    assert marked.split(content) == [f"{first}\n<__media__>", CAT]


def test_one_marker_for_all() -> None:
    marked = mark(messages(media_part(CAT), text("a"), media_part(BELL)), marker="<M>")
    assert marked.messages[0]["content"] == "<M>a<M>"
    assert list(marked.media.values()) == [CAT, BELL]


def test_the_environment_sets_the_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert media_marker() == media_marker()
    media_marker.cache_clear()
    monkeypatch.setenv("LLAMA_MEDIA_MARKER", "<__media__>")
    assert media_marker() == "<__media__>"
    media_marker.cache_clear()


def test_a_text_is_split_at_a_marker() -> None:
    marker = media_marker()
    assert split_at(f"{marker}a{marker}", marker, [CAT, DOG], "prompt") == [CAT, "a", DOG]
    assert split_at("a", marker, [], "prompt") == ["a"]
    with pytest.raises(InvalidRequestError) as caught:
        split_at(f"a{marker}", marker, [CAT, DOG], "prompt")
    assert caught.value.message == "'prompt' has 1 media markers, and there are 2 media."
