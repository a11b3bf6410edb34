"""Structural tags are read strictly: what is malformed is named, and their size is bounded."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.chat.grammar.structural import structural_grammar
from trioserve.errors import InvalidRequestError

ANY = {"type": "any_text"}
CALL = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}
NO_SCHEMA = {**CALL, "content": {"type": "json_schema", "json_schema": 5}}
CALLS = {"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL]}


@pytest.mark.parametrize(
    ("format", "param"),
    [
        (5, "format"),
        ({}, "format.type"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "format.type"),
        ({"type": "const_string"}, "format.value"),
        ({"type": "const_string", "value": 5}, "format.value"),
        ({"type": "json_schema"}, "format.json_schema"),
        ({"type": "json_schema", "json_schema": {}, "style": "xml"}, "format.style"),
        ({"type": "sequence", "elements": []}, "format.elements"),
        ({"type": "sequence", "elements": [ANY, CALLS]}, "format.elements[1]"),
        ({"type": "or", "elements": [5]}, "format.elements[0]"),
        ({"type": "tag", "begin": "a", "end": "b"}, "format.content"),
        ({"type": "tag", "begin": "a", "end": 5, "content": ANY}, "format.end"),
        ({**CALLS, "triggers": []}, "format.triggers"),
        ({**CALLS, "triggers": ["<", "<f"]}, "format.triggers"),
        ({**CALLS, "triggers": ["<<"]}, "format.tags[0].begin"),
        ({**CALLS, "at_least_one": 1}, "format.at_least_one"),
        ({**CALLS, "tags": [NO_SCHEMA]}, "format.tags[0].content.json_schema"),
    ],
)
def test_a_malformed_tag(format: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        structural_grammar({"type": "structural_tag", "format": format}, "tag")
    assert caught.value.param == f"tag.{param}"


def test_formats_are_bounded() -> None:
    deep: Any = ANY
    for _ in range(40):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(InvalidRequestError, match="nested more than 32 deep"):
        structural_grammar({"format": deep}, "tag")
    many = {"type": "or", "elements": [ANY] * 2000}
    with pytest.raises(InvalidRequestError, match="more than 1000 formats"):
        structural_grammar({"format": many}, "tag")
