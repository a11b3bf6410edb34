"""The benchmark of drafts and forced tokens."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import drafts
from benchmarks.plan import Address
from benchmarks.stats import Sample
from benchmarks.targets import Target, TargetError
from benchmarks.wire import Stream
from trioserve.models import BUNDLED


def options(*more: str) -> argparse.Namespace:
    return drafts.parse(["--model", "m.gguf", "--out", "out", *more])


def test_the_time_to_the_first_token_is_no_decode() -> None:
    stream = Stream(
        client=0,
        sent=0.0,
        total=9.5,
        error="",
        at=(4.0, 5.0, 9.0),
        tokens=11,
        counted=True,
        prompt_tokens=1,
        cached=0,
        prefilled=1,
    )
    assert drafts.decode_rate(stream) == 2.0


def test_servers_are_started_that_the_rows_need() -> None:
    peer = ("--llama-server", sys.executable)
    names = [each.name for each in drafts.commands_of(options(*peer))]
    assert names == [
        "llama-server, ngram-mod",
        "llama-server, ngram-simple",
        "llama-server",
        "trioserve, ngram-mod",
        "trioserve, ngram-simple",
        "trioserve",
        "trioserve, nothing forced",
    ]
    targets = [Target(name, Address("127.0.0.1", 1)) for name in names]
    assert [each.name for each in drafts.targets_of("edit", targets)] == names[:-1]
    forced = ["llama-server", "trioserve", "trioserve, nothing forced"]
    assert [each.name for each in drafts.targets_of("json", targets)] == forced
    only = [each.name for each in drafts.commands_of(options(*peer, "--rows", "json"))]
    assert only == forced
    with pytest.raises(TargetError, match="no program"):
        drafts.commands_of(options("--llama-server", "/nowhere"))


def test_a_line_has_its_ratios_to_the_base_and_to_the_same_drafts() -> None:
    rates = {
        "llama-server, ngram-mod": 8.0,
        "llama-server": 5.0,
        "trioserve, ngram-mod": 12.0,
        "trioserve": 4.0,
    }
    samples = {
        name: [Sample(numbers={"tokens/s": rate}, requests=2, failed=1)]
        for name, rate in rates.items()
    }
    settings = drafts.Settings()
    table = drafts.table(drafts.Fresh(settings, 1), samples)
    lines = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "3.000 [3.000, 3.000]  1.500 [1.500, 1.500]  1 of 2" in lines["trioserve, ngram-mod"]
    assert "2.000 [2.000, 2.000]" in lines["llama-server, ngram-mod"]
    assert "-  0.800 [0.800, 0.800]  1 of 2" in lines["trioserve"]


@pytest.mark.system
def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--model", str(BUNDLED), "--out", str(tmp_path), "--quiet", "--clients", "1"]
    command += ["--rounds", "1", "--max-tokens", "48", "-np", "1", "-t", "1"]
    assert drafts.main([*command, "--both-args", "-c 4096"]) == 0
    written = json.loads((tmp_path / "drafts.json").read_text())
    rows = written["results"]
    assert [name.partition(": ")[2] for name in rows] == [
        "edit, 1 stream",
        "json, 1 stream",
        "fresh, 1 stream",
    ]
    for row in rows.values():
        for (sample,) in row.values():
            assert sample["failed"] == 0 and sample["numbers"]["tokens"] == 48
    forced = rows[f"{BUNDLED.stem}: json, 1 stream"]
    at_once = {name: sample["numbers"]["tokens / decode"] for name, (sample,) in forced.items()}
    assert at_once[drafts.PLAIN] > 2
    assert at_once[drafts.UNFORCED] <= 1.0
    assert (tmp_path / "drafts.txt").read_text() == capsys.readouterr().out
