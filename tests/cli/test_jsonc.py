"""JSON with comments: what is changed, and all that stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioserve.cli.jsonc import Document, Step

TEXT = """// my settings
{
  "a": 1, // one
  "list": [
    {"name": "x"}, /* behind */
  ],
  "deep": {
    "b": "{]//" // last
  },
  bare: null
}
"""

PATHS: list[tuple[tuple[Step, ...], Any]] = [
    (("deep", "c"), {"k": [1, 2]}),
    (("new", "er", "est"), 5),
    (("list", ("name", "é")), {"name": "é"}),
    (("other", ("name", "t")), {"name": "t"}),
]


@pytest.mark.parametrize(("path", "value"), PATHS)
def test_what_is_added_can_be_removed(path: tuple[Step, ...], value: Any) -> None:
    before = Document(TEXT)
    after = before.put(path, value)
    assert after.value(path) == value
    lines = after.text.replace(",", "").splitlines()
    assert [line for line in TEXT.replace(",", "").splitlines() if line not in lines] == []
    left = after.remove(path, before.n_there(path))
    assert left.n_there(path) == before.n_there(path)
    assert left.text.replace(",", "") == TEXT.replace(",", "")


def test_a_value_is_replaced_in_its_place() -> None:
    after = Document(TEXT).put(("deep", "b"), [True]).put(("bare",), "x")
    assert after.value(("deep",)) == {"b": [True]}
    assert after.text.startswith(TEXT.partition('"{]//"')[0])
    assert 'bare: "x"\n}' in after.text and "] // last" in after.text
    with pytest.raises(KeyError):
        after.value(("deep", "c"))


@pytest.mark.parametrize("text", ["", "// nothing\n", "{}", "\ufeff{ }\n", '{\n\t"x": {}\n}'])
def test_from_nothing(text: str) -> None:
    after = Document(text).put(("x", "y"), 1)
    assert after.value(("x", "y")) == 1
    assert Document(after.text).put(("z",), 2).remove(("z",)).value(("x",)) == {"y": 1}


def test_in_a_list() -> None:
    path: tuple[Step, ...] = (("name", "t"),)
    document = Document('[{"name": "a"}, {"name": "b"}]')
    after = document.put(path, {"name": "t", "n": 1}).put(path, {"name": "t", "n": 2})
    assert json.loads(after.text) == [{"name": "a"}, {"name": "b"}, {"name": "t", "n": 2}]
    assert json.loads(after.remove((("name", "a"),)).remove(path).text) == [{"name": "b"}]
    assert json.loads(after.remove(path).remove((("name", "b"),)).text) == [{"name": "a"}]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{\n'a': 1}", 2),
        ('{"a" 1}', 1),
        ('{"a": 1', 1),
        ('{"a": one}', 1),
        ('{"a": 1}\n\n{}', 3),
        ('{"a": "x\n"}', 1),
        ("[" * 1000, 1),
        ("{,}", 1),
        ("/* open", 1),
    ],
)
def test_what_is_no_json(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=f"line {line} is not JSON"):
        Document(text)


@pytest.mark.parametrize(
    ("text", "path"), [('{"a": 1}', ("a", "b")), ('{"a": []}', ("a", "b")), ("{}", (("n", "t"),))]
)
def test_something_else_on_the_way(text: str, path: tuple[Step, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be set"):
        Document(text).put(path, {"n": "t"})
