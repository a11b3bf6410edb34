"""Pictures of results: what is drawn, and where."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from benchmarks import pictures, proof
from benchmarks.rows import BASE, OURS, Check, judge
from benchmarks.stats import Sample
from trioserve.bench import plot
from trioserve.bench.plot import Chart, Panel, Row
from trioserve.bench.stats import Spread

SVG = "{http://www.w3.org/2000/svg}"


def even(value: float) -> Spread:
    return Spread(value, value, value)


def draw(*rows: Row) -> ET.Element:
    panel = Panel(title="a < b, ms", more_is_better=False, rows=rows)
    return ET.fromstring(plot.bars("T & t", [OURS, BASE], [panel], "on a machine"))


def texts(root: ET.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_an_axis_has_a_few_round_numbers_and_ends_soon_after_the_most(most: float) -> None:
    marks = plot.ticks(most)
    assert marks[0] == 0
    assert 2 <= len(marks) <= 6
    assert marks[-2] < most * (1 + 1e-6)
    assert most <= marks[-1] * (1 + 1e-6)
    digits = {f"{mark / marks[1]:.9g}" for mark in marks}
    assert digits == {str(i) for i in range(len(marks))}


def test_a_bar_is_as_long_as_its_value_and_the_target_is_on_the_same_axis() -> None:
    row = Row(label="r", values={OURS: Spread(40, 30, 50), BASE: even(80)}, target=60, remark="met")
    root = draw(row)
    ours, base = (bar for bar in root.iter(f"{SVG}rect") if bar.get("height") == "9")
    assert (ours.get("class"), base.get("class")) == ("s0", "s1")
    left, width = float(ours.get("x", "")), float(ours.get("width", ""))
    assert float(base.get("width", "")) == pytest.approx(2 * width, abs=0.2)
    lines = {line.get("class"): line for line in root.iter(f"{SVG}line")}
    assert float(lines["target"].get("x1", "")) == pytest.approx(left + 1.5 * width, abs=0.2)
    spread = lines["axis spread"]
    ends = float(spread.get("x1", "")), float(spread.get("x2", ""))
    assert ends == pytest.approx((left + 0.75 * width, left + 1.25 * width), abs=0.2)
    assert {"T & t", "a < b, ms", "less is better", "40 / 80", "met", "target"} <= set(texts(root))


def test_curves_go_through_the_medians() -> None:
    lines = {OURS: [(1.0, even(10.0)), (4.0, even(40.0)), (16.0, Spread(20, 10, 40))]}
    chart = Chart(title="T", x_title="X", more_is_better=True, lines=lines)
    root = ET.fromstring(plot.curves("t", [OURS, BASE], [chart], "c"))
    at = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SVG}circle")]
    assert at[1][0] - at[0][0] == pytest.approx(
        at[2][0] - at[1][0], abs=0.2
    )  # a doubling is a step
    assert at[0][1] - at[1][1] == pytest.approx(3 * (at[0][1] - at[2][1]), abs=0.4)
    assert {"T", "X", "more is better", "1", "4", "16"} <= set(texts(root))


# -- from a file


def saved(tmp_path: Path) -> Path:
    """Results of one model, as `proof` writes them."""
    model = tmp_path / "m.gguf"
    model.touch()
    options = proof.parse(["--model", str(model), "--out", str(tmp_path)])
    results = []
    for clients, ours, base in ((1, 90.0, 100.0), (8, 220.0, 200.0)):
        samples = {
            OURS: [Sample(numbers={"tokens/s": ours, "ttft p50": 5.0})] * 3,
            BASE: [Sample(numbers={"tokens/s": base, "ttft p50": 10.0})] * 3,
        }
        checks = [
            Check(text="throughput", metric="tokens/s", bound=1.05, least=True, ratio=True),
            Check(text="TTFT", metric="ttft p50", bound=4.0),
            Check(text="failed", bound=0),
        ]
        results.append(
            proof.Result(
                model="m",
                row="streams",
                scenario=f"{clients} stream{'s' * (clients > 1)}, 64 tokens",
                samples=samples,
                verdicts=tuple(judge(check, samples) for check in checks),
            )
        )
    results.append(proof.Result(model="m", row="x", scenario="x", error="gone"))
    proof.write(options, results)
    return tmp_path / "results.json"


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_each_figure_has_a_panel(tmp_path: Path) -> None:
    throughput, ttft = pictures.panels(load(saved(tmp_path)))
    assert throughput.more_is_better and not ttft.more_is_better
    assert throughput.title == "Throughput, tokens/s"
    one, eight = throughput.rows
    assert one.label == "1 stream, 64 tokens: m"
    assert (one.target, one.remark) == (105.0, "0.90\N{MULTIPLICATION SIGN}, missed")
    assert (eight.target, eight.remark) == (210.0, "1.10\N{MULTIPLICATION SIGN}, met")
    assert ttft.rows[0].target == 4.0


def test_pictures_are_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, folder = saved(tmp_path), tmp_path / "docs"
    assert proof.main(["--draw", str(results), "--out", str(folder)]) == 0
    names = ["results.svg", "results-clients.svg"]
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    for name in names:
        assert (folder / name).read_text() == (tmp_path / name).read_text()
        assert "Models: m." in " ".join(texts(ET.fromstring((folder / name).read_text())))


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for content in ("{}", "[1]", '{"machine": {}, "results": [1], "flags": ""}'):
        other.write_text(content)
        with pytest.raises(ValueError, match="no file of results"):
            pictures.write(other, tmp_path)
    for flags in (["--draw", str(tmp_path / "none.json")], []):
        with pytest.raises(SystemExit):
            proof.parse([*flags, "--out", str(tmp_path)])
