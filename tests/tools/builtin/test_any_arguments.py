"""Whatever a model writes as arguments: an answer that can be sent, or an error that names it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support.file_tools import tool_in
from trioserve.errors import InvalidRequestError
from trioserve.tools.builtin.file_tools import EditFile, FileCall, ReadFile, WriteFile
from trioserve.tools.builtin.search import FindFiles, GrepFiles
from trioserve.tools.tool import ToolCallContext

_words = [
    "a", "d", "d/b", "..", "", "/", "~", "text", "(", "[", "**", "*", "\\", "\0", "\ud800",
    "\udcff",
]  # fmt: skip
_texts = st.one_of(st.sampled_from(_words), st.text(max_size=8))
_values = st.one_of(
    _texts,
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**63, -(10**30), 1.0, 1.5, float("inf"), "3", "true", "1e5"]),
    st.lists(_texts, max_size=2),
)


def arguments_of(tool: type[FileCall]) -> st.SearchStrategy[dict[str, Any]]:
    names: tuple[str, ...] = tool.__struct_fields__
    edits = st.lists(st.fixed_dictionaries({"old_text": _texts, "new_text": _texts}), max_size=3)
    likely = {"edits": edits, "path": _texts, "pattern": _texts}
    fields = {name: st.one_of(likely.get(name, _values), _values) for name in names}
    return st.fixed_dictionaries({}, optional=fields)


@pytest.mark.parametrize("tool", [ReadFile, FindFiles, GrepFiles, WriteFile, EditFile])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_arguments_are_answered(
    tmp_path: Path, tool: type[FileCall], data: st.DataObject
) -> None:
    folder = tmp_path / "folder"
    (folder / "d").mkdir(parents=True, exist_ok=True)
    (folder / "a").write_text("text\n(*\n\n")
    made = tool_in(folder, tool)
    arguments = data.draw(arguments_of(tool))

    refused: list[str | None] = []

    async def call() -> None:
        preview = await made.preview(arguments, ToolCallContext())
        try:
            result = await made.call(arguments, ToolCallContext())
        except InvalidRequestError as error:
            refused.append(error.param)
            return
        json.dumps(result.answer, ensure_ascii=False).encode()
        (result.text + (preview or "") + (result.diff or "")).encode()
        assert preview == (None if result.is_error else result.diff)

    trio.run(call)
    for param in refused:
        assert re.split(r"[.\[]", str(param))[0] in tool.__struct_fields__
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
