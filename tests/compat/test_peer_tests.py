"""llama-server's own tests: what stands for their models, and how results are sorted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.compat import peer_known, peer_plugin, peer_tests, stand_ins
from tests.compat.peer_tests import Result, sorted_in, table
from trioserve.config import Config
from trioserve.llama.model import LlamaModel

ROOT = Path(__file__).parents[2]


def row(name: str, outcome: str, message: str = "", texts: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"id": f"unit/{name}", "outcome": outcome, "message": message, "texts": list(texts)}


@pytest.mark.parametrize(
    ("given", "column"),
    [
        (row("test_a.py::test_b", "passed"), "passed"),
        (row("test_a.py::test_b", "passed", texts=("(girl)+ in 'x'",)), "but its text"),
        (row("test_a.py::test_b", "skipped", peer_plugin.LATER + "images"), "later"),
        (row("test_a.py::test_b", "skipped", peer_plugin.MODEL + "big"), "needs a model"),
        (row("test_a.py::test_b", "skipped", "slow"), "skipped"),
        (row("test_a.py::test_b", "failed", "assert 1 == 2"), "failed"),
        (row("test_completion.py::test_completion[x]", "failed", "assert 21 == 18"),
         "needs a model"),
        (row("test_completion.py::test_completion[x]", "failed", "assert 400 == 200\n + where"),
         "failed"),
        (row("test_completion.py::test_completion[x]", "failed", "KeyError: 'x'"), "failed"),
        (row("test_compat_anthropic.py::test_anthropic_empty_messages", "failed",
             "assert 400 == 200\n + where"), "accepted"),
        (row("test_compat_anthropic.py::test_anthropic_empty_messages", "failed",
             "assert 500 == 200\n + where"), "failed"),
    ],
)  # fmt: skip
def test_a_result_is_sorted_by_what_became_of_it(given: Any, column: str) -> None:
    assert sorted_in(given).column == column


def test_the_table_has_a_line_for_each_file_and_one_for_all() -> None:
    results = [Result("unit/test_b.py::x", "passed"), Result("unit/test_a.py::y", "failed")]
    head, *lines = table(results).splitlines()
    assert [line.split()[0] for line in lines] == ["test_a.py", "test_b.py", "all"]
    assert lines[-1].split() == ["all", "1", ".", ".", ".", ".", ".", "1"]
    assert head.split()[0] == "passed"


def test_every_model_that_stands_for_another_can_be_loaded(tmp_path: Path) -> None:
    models = stand_ins.write_all(tmp_path)
    assert stand_ins.write_all(tmp_path) == models  # found, not written again
    for path in {path for path in models.values() if path.name != "lora.gguf"}:
        serves = {"embeddings": path.name == "encoder.gguf", "reranking": path.name == "judge.gguf"}
        with LlamaModel.load(Config(model=str(path), **serves)) as model:
            assert model.vocab.tokenize("Once upon a time")
            assert (model.vocab.fim.prefix >= 0) is (path.name == "stories-infill.gguf")


def test_the_documentation_names_every_difference() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs/api.md").read_text()).lower()
    for known in peer_known.KNOWN:
        if known.column == peer_known.ACCEPTED:
            assert known.why.lower() in page
        else:
            assert known.column == peer_known.NEEDS_MODEL
    for name in peer_tests._DEFAULTS:
        flag = name.partition("_ARG_")[2] or name.removeprefix("TRIOSERVE_")
        if flag != "THREADS":
            assert flag.lower().replace("_", "-") in page
