"""The published table: counting, judging, writing; and that each program can be started."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import attrs
import pytest

import benchmarks
from benchmarks import proof, report
from benchmarks.chats import Turn, new_tokens
from benchmarks.driver import Address, Outcome, Run
from benchmarks.many import ManyClients
from benchmarks.rows import MET, MISSED, MISSING, QUICK, Check, Sizes, judge, rows
from benchmarks.scenarios import Settings
from benchmarks.servers import BASE, OURS, Command, Flags, Target, TargetError, layout_of, running
from benchmarks.stats import Metric, Sample, ratio
from trioserve.bench.stats import Spread

PROGRAMS = ("cancel", "gguf_maker", "gpu", "pair", "proof", "speech", "trace", "wakeups")


@pytest.mark.system
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_help(name: str) -> None:
    if name == "gguf_maker":
        pytest.importorskip("gguf")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m benchmarks.{name}" in done.stdout


@pytest.mark.system
def test_the_clocks_of_a_trace_find_their_places() -> None:
    code = "from benchmarks.trace import Recorder; Recorder().install()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_program_is_forgotten() -> None:
    folder = Path(benchmarks.__file__).parent
    found = [path.stem for path in folder.glob("*.py") if '"__main__"' in path.read_text()]
    assert sorted(PROGRAMS) == sorted(found)


def samples(ours: list[float], base: list[float], **more: int) -> dict[str, list[Sample]]:
    return {
        OURS: [Sample(numbers={"n": value}, **more) for value in ours],
        BASE: [Sample(numbers={"n": value}) for value in base],
    }


def check(**more: object) -> Check:
    return Check(**{"text": "a < b", "metric": "n", "bound": 4.0, "ratio": False, **more})


@pytest.mark.parametrize(
    ("check", "outcome"),
    [
        (check(), MET),
        (check(bound=3.9), MISSED),
        (check(least=True), MET),
        (check(bound=2.0, ratio=True), MET),
        (check(bound=2.1, least=True, ratio=True), MISSED),
        (check(metric="m"), MISSING),
    ],
)
def test_judging(check: Check, outcome: str) -> None:
    verdict = judge(check, samples([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]))
    assert (verdict.outcome, verdict.rounds) == (outcome, 3)
    if check.ratio:
        assert verdict.base is None
        assert verdict.value == Spread(2.0, 2.0, 3.0)


def test_failed_requests_meet_no_target() -> None:
    assert judge(check(), samples([1.0], [1.0], failed=1)).outcome == MISSED
    assert judge(check(ratio=True), {OURS: [Sample(numbers={"n": 1.0})]}).outcome == MISSING


def test_ratios_are_of_rounds_that_both_have() -> None:
    mine = [Sample(numbers={"n": value}) for value in (2.0, 4.0, 9.0)]
    base = [Sample(numbers={"n": value}) for value in (1.0, 2.0, 3.0)]
    assert ratio(mine, base, "n") == Spread(2.0, 2.0, 3.0)
    assert ratio([Sample(numbers={}), *mine[1:]], base, "n") == Spread(2.6, 2.0, 3.0)
    table = report.table("title", [Metric("n", "ms"), Metric("m", "")], {"a": mine, "b": base})
    assert "4.0 [2.0, 9.0]  2.0 [1.0, 3.0]  2.000 [2.000, 3.000]" in table


@pytest.mark.parametrize("sizes", [Sizes(), QUICK])
def test_every_check_has_a_number_of_its_scenario(sizes: Sizes) -> None:
    table = rows(sizes)
    assert len({row.key for row in table}) == len(table)
    for row in table:
        for case in row.cases:
            scenario = case.scenario(Settings())
            assert scenario.name
            assert {check.metric for check in case.checks} <= {m.name for m in scenario.metrics}


def options(tmp_path: Path, *more: str) -> list[str]:
    model = tmp_path / "m.gguf"
    model.touch()
    return ["--model", str(model), "--out", str(tmp_path / "out"), "--quiet", *more]


def test_the_results_are_written(tmp_path: Path) -> None:
    found = samples([1.0, 3.0], [5.0, 7.0])
    good = proof.Result(
        model="m",
        row="r",
        scenario="s",
        samples=found,
        verdicts=(judge(check(bound=2.0, unit="ms"), found),),
        layouts={OURS: "elastic", BASE: "split"},
        base=BASE,
    )
    bad = proof.Result(model="m", row="r", scenario="r", error="TargetError: gone\nlog")
    parsed = proof.parse(options(tmp_path))
    parsed.out.mkdir()
    proof.write(parsed, [good, bad])
    written = json.loads((parsed.out / "results.json").read_text())
    assert written["results"][0]["samples"][OURS][1]["numbers"] == {"n": 3.0}
    assert written["results"][0]["verdicts"][0]["check"]["target"] == "at most 2 ms"
    table = (parsed.out / "results.md").read_text()
    cell = "2.00 ms [1.00, 3.00] met (llama-server 6.00 ms [5.00, 7.00])"
    assert f"| s | a < b | at most 2 ms | {cell} |" in table
    assert "| r | - | - | failed: TargetError: gone |" in table
    assert "- m (r): trioserve elastic, llama-server split" in table
    root = ET.fromstring((parsed.out / "results.svg").read_text())
    kinds = [element.get("class") for element in root if element.get("height") == "9"]
    assert kinds == ["s0", "s1"]


@attrs.frozen
class Broken:
    """A scenario that fails on one server."""

    name = "broken"
    metrics = (Metric("n", ""),)

    def measure(self, target: Target, seed: str) -> Sample:
        if target.name == OURS:
            raise TargetError("no answer")
        return Sample(numbers={"n": 1.0}, notes=(seed,))


def test_an_error_of_one_server_leaves_the_other() -> None:
    targets = [Target(name, Address("127.0.0.1", 1)) for name in (OURS, BASE)]
    notes: list[str] = []
    found = report.in_turn(targets, Broken(), 2, notes.append)
    assert [sample.failed for sample in found[OURS]] == [1, 1]
    assert [sample.notes[0] for sample in found[BASE]] == ["broken round 0", "broken round 1"]
    assert [note.rpartition(" ")[2] for note in notes] == [OURS, BASE, BASE, OURS]
    once = report.in_turn(targets, Broken(), 9, notes.append, until=-math.inf)
    assert [len(found) for found in once.values()] == [1, 1]


def test_a_row_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_row(_options: object, model: Path, row: object, *_rest: object) -> list[proof.Result]:
        ran.append(row)
        if len(ran) == 1:
            raise ZeroDivisionError("once")
        verdict = judge(check(), samples([1.0], [1.0]))
        return [proof.Result(model="m", row="r", scenario="s", verdicts=(verdict,))]

    ran: list[object] = []
    monkeypatch.setattr(proof, "run_row", run_row)
    assert proof.main(options(tmp_path, "--rows", "single,chats")) == 1
    assert len(ran) == 2
    assert "1 met, 0 missed, 0 not measured, 1 rows failed" in capsys.readouterr().out
    assert proof.main(options(tmp_path, "--rows", "single")) == 0
    assert proof.main(options(tmp_path, "--rows", "single", "--budget", "1e-9")) == 1
    assert len(ran) == 3
    assert "--budget were used up" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.system
def test_a_server_that_ends_at_once_is_noticed(tmp_path: Path) -> None:
    command = Command("gone", ("python3", "-c", "import sys; print('no model'); sys.exit(3)"))
    with (
        pytest.raises(TargetError, match=r"(?s)ended with code 3.*no model"),
        running(command, Flags(model=tmp_path / "m.gguf"), tmp_path / "log"),
    ):
        pytest.fail("it never ran")


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ('{"event": "KV cache", "layout": "elastic", "tokens": 8192}', "elastic"),
        ("load_model: n_slots = 8, kv_unified = 'false'", "split"),
        ("llama_context: kv_unified    = true", "unified"),
        ("nothing", "not in the log"),
    ],
)
def test_the_layout_is_read_from_a_log(tmp_path: Path, line: str, layout: str) -> None:
    (tmp_path / "log").write_text(f"first\n{line}\n")
    assert layout_of(tmp_path / "log") == layout


def test_new_tokens_are_those_that_no_earlier_request_had() -> None:
    system = (1, 2, 3, 4)
    first = Turn(chat=0, sent=1.0, prompt=(*system, 10), answer=(20, 21))
    other = Turn(chat=1, sent=2.0, prompt=(*system, 11), answer=(22,))
    after = Turn(chat=0, sent=3.0, prompt=(*system, 10, 20, 21, 12), answer=())
    # 5 of the first, 1 of the second, then the last token: its answer is known as generated.
    assert new_tokens([after, other, first]) == 7
    # The answer of another chat is not one's own past.
    assert new_tokens([first, attrs.evolve(after, chat=2)]) == 8


def test_a_server_that_turns_to_both_keys_gives_each_half() -> None:
    def ended(client: int, when: float) -> Outcome:
        return Outcome(client=client, sent=0.0, ended=when, status=200)

    def share(order: list[int]) -> float:
        outcomes = tuple(ended(client, float(when)) for when, client in enumerate(order))
        many = ManyClients(Settings(), clients=16, streams=False)
        return many._sample(Run(outcomes=outcomes, wall=1.0, cpu=0.0)).numbers["share of the few"]

    others = [client for client in range(16) if client % 8 != 7]
    assert share([0, 7, 1, 15, *others[2:]]) == 0.5
    assert share([*others, 7, 15]) == 2 / 16
