"""Every format: what a model writes comes back, streamed and whole, and nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import string
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.message_writers import WRITERS, Call, Writer, parts
from tests.support.parsing import deltas_of, parse
from trioserve.chat.deltas import ContentDelta, ReasoningDelta, ToolCallStart
from trioserve.chat.formats.families import FAMILIES
from trioserve.chat.formats.syntax import ChatFormat, Ignore, Parameters
from trioserve.chat.parse.message import REASONING_FORMATS

#: For each format and property; set it higher to search for longer.
EXAMPLES = int(os.environ.get("CHAT_EXAMPLES", "5"))

# -- what models write comes back

IDENTIFIERS = st.text(string.ascii_letters + "_", min_size=1, max_size=6)
NAMES = st.builds(str.__add__, IDENTIFIERS, st.text(string.digits + "_-", max_size=3)).filter(
    lambda name: name != "all"  # which is no function in one of the formats
)
ODD = ['"', "'", "\\", "\n", "{", "}", "[", "]", "(", ")", "<", ">", "é", "\u2028", "12", "true"]


def strings(writer: Writer) -> st.SearchStrategy[str]:
    """Make strings, many with markers of the format in them."""
    pieces = sorted(writer.format.texts) + ODD
    texts = st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=5).map("".join)
    return texts.map(writer.clean)


def arguments(writer: Writer) -> st.SearchStrategy[dict[str, Any]]:
    text = strings(writer)
    keys = IDENTIFIERS if writer.plain_keys else text
    number = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    value = st.recursive(
        st.none() | st.booleans() | number | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=5,
    )
    return st.dictionaries(keys, value, max_size=3)


def tools_for(calls: list[Call]) -> list[dict[str, Any]]:
    """Declare the tools of calls, with the types of their arguments."""
    return [
        {
            "function": {
                "name": name,
                "parameters": {
                    "properties": {
                        key: {"type": "string" if isinstance(value, str) else "object"}
                        for key, value in values.items()
                    }
                },
            }
        }
        for name, values in calls
    ]


def unlike(writer: Writer) -> Callable[[str], bool]:
    """Make a test that plain text has no marker that would not be plain."""
    found = writer.markers

    def fits(text: str) -> bool:
        return not any(mark in text for mark in found)

    return fits


@pytest.mark.parametrize("name", sorted(WRITERS))
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_what_a_model_writes_comes_back(name: str, data: st.DataObject) -> None:
    writer = WRITERS[name]
    plain = st.text(string.ascii_letters + "<[{ }]>|é\n", max_size=12).filter(unlike(writer))
    call = st.tuples(NAMES, arguments(writer))
    calls = data.draw(st.lists(call, max_size=3, unique_by=lambda one: one[0]))
    content = data.draw(plain.map(lambda text: text.strip("\n >")))
    if writer.bare and calls:
        calls, content = calls[: writer.most], ""
    reasoning = data.draw(plain.map(lambda text: text.strip("\n")))
    if not writer.reasoning:
        reasoning = ""
    text = writer.write(reasoning, content, calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    kwargs: dict[str, Any] = {
        "parse_tools": True,
        "tools": tools_for(calls),
        "prompt_tail": writer.prompt,
    }
    whole = parse([text], writer.format, **kwargs)
    assert (whole.content, whole.reasoning_content) == (content, reasoning)
    found = [(one.name, json.loads(one.arguments)) for one in whole.tool_calls]
    assert found == calls
    assert parse(pieces, writer.format, **kwargs) == whole
    assert parse(list(text), writer.format, **kwargs) == whole


BLOCKS = st.lists(
    st.tuples(
        st.sampled_from(["think", "say", "call"]), st.text("abc é.-", min_size=1, max_size=9)
    ),
    max_size=7,
)


def written(writer: Writer, blocks: list[tuple[str, str]]) -> str:
    """Write blocks one after another; the prompt has begun no reasoning."""
    format, texts = writer.format, []
    for kind, text in blocks:
        if kind == "call":
            texts.append(writer.write_calls([("f", {"a": text})]))
        elif kind == "say":
            texts.append(writer.content.replace("{}", f"{text}\n"))
        elif format.channels is not None:
            texts.append(writer.reasoning.replace("{}", text))
        else:
            assert format.reasoning is not None
            texts.append(f"{format.reasoning.start}\n{text}\n{format.reasoning.end}\n")
    start = "" if format.channels is None else format.channels.start + format.channels.role
    return "".join(texts) if not start else start.join(["", *texts]).replace(start * 2, start)


def read(pieces: Iterable[str], format: ChatFormat) -> list[tuple[str, str]]:
    """The blocks that a text is read as."""
    blocks: list[tuple[str, str]] = []
    for delta in deltas_of(pieces, format, tools=tools_for([("f", {"a": ""})])):
        kind = {ReasoningDelta: "think", ContentDelta: "say"}.get(type(delta), "call")
        text = "" if isinstance(delta, ToolCallStart) else delta.text
        if blocks and blocks[-1][0] == kind and not isinstance(delta, ToolCallStart):
            text = blocks.pop()[1] + text
        blocks.append((kind, text))
    return [
        (kind, json.loads(text)["a"] if kind == "call" else text.replace("\n", ""))
        for kind, text in blocks
    ]


#: The formats in which text, reasoning and calls may come in any order.
MIXED = [
    name
    for name, writer in WRITERS.items()
    if writer.reasoning and not writer.bare and writer.most > 1 and name != "apriel"
]


@pytest.mark.parametrize("name", MIXED)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_text_reasoning_and_calls_in_any_order(name: str, data: st.DataObject) -> None:
    writer = WRITERS[name]
    blocks = [(kind, text.strip() or "x") for kind, text in data.draw(BLOCKS)]
    text = written(writer, blocks)
    expected: list[tuple[str, str]] = []
    for kind, said in blocks:
        if expected and kind != "call" and expected[-1][0] == kind:
            expected[-1] = (kind, expected[-1][1] + said)
        else:
            expected.append((kind, said))
    assert read([text], writer.format) == expected
    assert read(text, writer.format) == expected


def test_every_format_has_a_writer() -> None:
    assert FAMILIES.keys() <= WRITERS.keys()


# -- and whatever else they write is not lost, and the same for each split


def fragments(format: ChatFormat) -> st.SearchStrategy[str]:
    own = sorted(format.texts)
    calls = [
        writer.write("", "", [("f", {"a": "é", "b": 1})])
        for writer in WRITERS.values()
        if writer.format is format
    ]
    pieces = [*own, *own, *calls, '{"name": "f", "arguments": {"a": 1}}', "{}", *ODD, "f", " "]
    part = st.sampled_from(pieces)
    cut = st.builds(lambda text, length: text[:length], part, st.integers(1, 12))
    return st.lists(part | cut | st.text(max_size=2), max_size=10).map("".join)


def skips_text(format: ChatFormat) -> bool:
    """True if a format has places for text that no client needs, such as ids and headers."""
    if format.channels is not None:
        return True
    return any(
        isinstance(one, Ignore) or (isinstance(one, Parameters) and one.text_attribute)
        for one in parts(format)
    )


@pytest.mark.parametrize("name", sorted(WRITERS))
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_streamed_equals_whole_and_nothing_is_lost(name: str, data: st.DataObject) -> None:
    """No marker has an é, so each one that goes in comes out."""
    format = WRITERS[name].format
    text = data.draw(fragments(format))
    start, end = ("", "") if (one := format.thinking) is None else (one.start, one.end)
    tails = ["", end, f"{start}\n", f"{start}\n\n{end}\n\n"]
    kwargs = {
        "prompt_tail": data.draw(st.sampled_from(tails)),
        "parse_tools": data.draw(st.sampled_from([True, True, True, False])),
        "reasoning_format": data.draw(st.sampled_from(sorted(REASONING_FORMATS))),
    }
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = parse([text], format, **kwargs)
    assert parse(pieces, format, **kwargs) == whole
    assert parse(list(text), format, **kwargs) == whole
    if not skips_text(format):
        message = parse([text], format, parse_tools=True)
        shown = message.content + message.reasoning_content
        shown += "".join(call.name + call.arguments for call in message.tool_calls)
        assert shown.count("é") + shown.count("\\u00e9") == text.count("é")
