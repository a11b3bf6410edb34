"""The table of targets: counting, judging, drawing. Nothing here depends on how long it takes."""

from __future__ import annotations

import base64
import io
import json
import math
import socket
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import attrs
import pytest
from hypothesis import given, strategies as st

from benchmarks import cancel, proof, report
from benchmarks.busy import Beside
from benchmarks.catalogue import SCENARIOS
from benchmarks.chats import Frame, Seen, Turn, frame_of, new_tokens
from benchmarks.driver import run
from benchmarks.harness import Command, Flags, layout_of, running
from benchmarks.plan import Outcome, Plan, Request
from benchmarks.rows import (
    BASE,
    MET,
    MISSED,
    MISSING,
    OURS,
    QUICK,
    UNSUPPORTED,
    Check,
    Sizes,
    judge,
    rows,
)
from benchmarks.scenarios import Settings
from benchmarks.selfcheck import HEAD, chunk, read_request
from benchmarks.stats import Metric, Sample
from benchmarks.structured import SCHEMA, Structured
from benchmarks.targets import Target, TargetError, target_of
from benchmarks.wire import Shape, answer_of
from tests.support.canned_server import serving_bytes
from trioserve.bench.stats import Spread


def native(content: str, **more: object) -> bytes:
    """One event of ``/completion``."""
    return b"data: %b\n\n" % json.dumps({"content": content, **more}).encode()


LAST = native("", stop=True, tokens_predicted=2, tokens_evaluated=3, timings={"prompt_n": 3})
ANSWER = HEAD + chunk(native("a", tokens=[1])) + chunk(native("b", tokens=[2])) + chunk(LAST)
ANSWER += chunk(b"")


def plain(status: str, body: object) -> bytes:
    """A whole answer of JSON."""
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def outcome(*times: float, body: bytes = b"", sent: float = 10.0) -> Outcome:
    return Outcome(
        client=0, sent=sent, ended=sent + 9, status=200, sse=True, times=times, body=body
    )


# -- what is new


def test_new_tokens_are_those_that_no_earlier_request_had() -> None:
    system = (1, 2, 3, 4)
    first = Turn(chat=0, sent=1.0, prompt=(*system, 10), answer=(20, 21), again=(*system, 10, 99))
    other = Turn(chat=1, sent=2.0, prompt=(*system, 11), answer=(22,), again=(*system, 11, 22))
    after = Turn(chat=0, sent=3.0, prompt=(*system, 10, 20, 21, 12), answer=(), again=())
    # 5 of the first, 1 of the second, then the last token: its answer is known as generated.
    # As text, the answer of the first is another token, so that it is new as well.
    assert new_tokens([after, other, first]) == (7, 9)
    # The answer of another chat is not one's own past.
    assert new_tokens([first, attrs.evolve(after, chat=2)]) == (8, 8)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6))
def test_the_longest_prefix_seen(sequences: list[list[int]]) -> None:
    seen = Seen()
    for tokens in sequences:
        seen.add(tokens)
        assert seen.known(tokens) == len(tokens)
    asked = [0, 1, 2, 3]
    common = [
        next((n for n, (a, b) in enumerate(zip(s, asked, strict=False)) if a != b), min(len(s), 4))
        for s in sequences
    ]
    assert seen.known(asked) == max(common, default=0)


def test_a_chat_is_framed_as_the_template_says() -> None:
    prompt = "<s>Wsystem</s><u>Wuser</u><a>Wanswer</a><u>Wnext</u><a>"
    with serving_bytes(plain("200 OK", {"prompt": prompt})) as address:
        frame = frame_of(Target("x", address))
    assert frame == Frame("<s>", "</s><u>", "</u><a>", "</a><u>", "</u><a>")
    assert frame.prompt("S", ["one"], []) == "<s>S</s><u>one</u><a>"
    assert frame.prompt("S", ["1", "2"], ["A"]) == "<s>S</s><u>1</u><a>A</a><u>2</u><a>"
    with (
        serving_bytes(plain("200 OK", {"prompt": "wsystem"})) as address,
        pytest.raises(TargetError, match="apply-template"),
    ):
        frame_of(Target("x", address))


def test_a_plan_goes_on_with_what_came_back() -> None:
    texts: list[tuple[str, list[int]]] = []

    def then(found: Outcome) -> Request | None:
        texts.append(answer_of(found))
        return shape.request("more") if len(texts) < 3 else None

    shape = Shape(api="completion")
    with serving_bytes(ANSWER, keep=3) as address:
        result = run(address, [Plan(requests=[shape.request("x")], then=then)], timeout=60)
    assert len(result.outcomes) == 3
    assert texts == [("ab", [1, 2])] * 3


# -- steps and slots


def test_a_request_is_cut_off_while_it_decodes() -> None:
    closed = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            connection.sendall(HEAD + chunk(native("a")) + chunk(native("b")))
            if connection.recv(1) == b"":
                closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = target_of(f"http://127.0.0.1:{listener.getsockname()[1]}").address
        request = Shape(api="completion").request("x")
        assert cancel.cut(address, request, 10.0, 2, 10.0) is not None
        thread.join(10)
    assert closed.is_set()


# -- other busy processes


@pytest.mark.system
def test_a_stream_is_compared_with_one_beside_others() -> None:
    settings = Settings(shape=Shape(api="completion"), timeout=60)
    with serving_bytes(ANSWER, ANSWER, ANSWER) as address:
        sample = Beside(settings, max_tokens=2).measure(Target("x", address), "seed")
    numbers = sample.numbers
    assert (sample.requests, sample.failed, sample.notes) == (2, 0, ())
    assert numbers["busy / quiet"] == numbers["tokens/s"] / numbers["tokens/s quiet"]
    broken = plain("500 Internal Server Error", {})
    with serving_bytes(ANSWER, ANSWER, broken) as address:
        sample = Beside(settings, max_tokens=2).measure(Target("x", address), "seed")
    assert (sample.requests, sample.failed) == (2, 1)
    assert "busy / quiet" not in sample.numbers


# -- structured output


def test_a_server_without_schemas_is_no_failure() -> None:
    refused = plain("400 Bad Request", {"error": {"message": "no such field"}})
    with serving_bytes(refused) as address:
        sample = Structured(Settings(timeout=60)).measure(Target("x", address), "seed")
    assert (sample.failed, sample.numbers) == (0, {})
    assert sample.notes == ("not supported yet: HTTP 400: no such field",)
    with serving_bytes(ANSWER) as address:
        sample = Structured(Settings(timeout=60)).measure(Target("x", address), "seed")
    assert sample.notes == ("the schema was not followed: 'ab'",)
    json.dumps(SCHEMA)


# -- verdicts


def samples(ours: list[float], base: list[float], **more: int) -> dict[str, list[Sample]]:
    return {
        OURS: [Sample(numbers={"n": value}, **more) for value in ours],
        BASE: [Sample(numbers={"n": value}) for value in base],
    }


@pytest.mark.parametrize(
    ("check", "outcome"),
    [
        (Check(text="", metric="n", bound=4.0), MET),
        (Check(text="", metric="n", bound=3.9), MISSED),
        (Check(text="", metric="n", bound=4.0, least=True), MET),
        (Check(text="", metric="n", bound=2.0, ratio=True), MET),
        (Check(text="", metric="n", bound=2.1, least=True, ratio=True), MISSED),
        (Check(text="", metric="m", bound=1.0), MISSING),
        (Check(text="", bound=0), MET),
    ],
)
def test_judging(check: Check, outcome: str) -> None:
    verdict = judge(check, samples([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]))
    assert (verdict.outcome, verdict.rounds) == (outcome, 3)
    if check.ratio:
        assert verdict.base is None
        assert verdict.value == Spread(2.0, 2.0, 3.0)


def test_failed_requests_meet_no_target() -> None:
    found = samples([1.0], [1.0], failed=1)
    assert judge(Check(text="", metric="n", bound=4.0), found).outcome == MISSED
    assert judge(Check(text="", bound=0), found).outcome == MISSED
    refused = {OURS: [Sample(numbers={}, notes=("not supported yet: no",))], BASE: []}
    assert judge(Check(text="", metric="n", bound=1), refused).outcome == UNSUPPORTED
    alone = {OURS: [Sample(numbers={"n": 1.0})]}
    assert judge(Check(text="", metric="n", bound=1, ratio=True), alone).outcome == MISSING


@pytest.mark.parametrize("sizes", [Sizes(), QUICK])
def test_every_check_has_a_number_of_its_scenario(sizes: Sizes) -> None:
    table = rows(sizes)
    assert len({row.key for row in table}) == len(table)
    for row in table:
        for scenario, checks in row.scenarios(Settings()):
            assert checks
            names = {metric.name for metric in scenario.metrics}
            assert {check.metric for check in checks} - {""} <= names
    for make in SCENARIOS.values():
        assert all(scenario.name for scenario in make(Settings(), [1]))


# -- the pictures and the tables


def test_the_results_are_written(tmp_path: Path) -> None:
    check = Check(text="a < b", metric="n", bound=2.0, unit="ms")
    found = samples([1.0, 3.0], [5.0, 7.0])
    good = proof.Result(
        model="m",
        row="r",
        scenario="s",
        samples=found,
        verdicts=(judge(check, found),),
        layouts={OURS: "elastic", BASE: "split"},
    )
    bad = proof.Result(model="m", row="r", scenario="r", error="TargetError: gone\nlog")
    model = tmp_path / "m.gguf"
    model.touch()
    options = proof.parse(["--model", str(model), "--out", str(tmp_path)])
    proof.write(options, [good, bad])
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["results"][0]["samples"][OURS][1]["numbers"] == {"n": 3.0}
    assert written["results"][0]["verdicts"][0]["check"]["target"] == "at most 2 ms"
    table = (tmp_path / "results.md").read_text()
    cell = "2.00 ms [1.00, 3.00] met (llama-server 6.00 ms [5.00, 7.00])"
    assert "| scenario | figure | target | m |" in table
    assert f"| s | a < b | at most 2 ms | {cell} |" in table
    assert "| r | - | - | failed: TargetError: gone |" in table
    assert "- m (r): trioserve elastic, llama-server split" in table
    root = ET.fromstring((tmp_path / "results.svg").read_text())
    kinds = [element.get("class") for element in root if element.get("height") == "9"]
    assert kinds == ["s0", "s1"]
    assert "a\\|b" in report.markdown([["a|b"]])


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ('{"event": "KV cache", "layout": "elastic", "tokens": 8192}', "elastic"),
        ("KV cache   layout=split tokens=8192", "split"),
        ("load_model: n_slots = 8, kv_unified = 'false'", "split"),
        ("llama_context: kv_unified    = true", "unified"),
        ("nothing", "not in the log"),
    ],
)
def test_the_layout_is_read_from_a_log(tmp_path: Path, line: str, layout: str) -> None:
    (tmp_path / "log").write_text(f"first\n{line}\n")
    assert layout_of(tmp_path / "log") == layout


def test_an_image_of_noise_can_be_read() -> None:
    av = pytest.importorskip("av")
    data = base64.b64decode(cancel.noise("a", 16).partition(",")[2])
    with av.open(io.BytesIO(data)) as file:
        (frame,) = file.decode(video=0)
    assert (frame.width, frame.height) == (16, 16)
    assert cancel.noise("a", 16) != cancel.noise("b", 16)


# -- what goes wrong


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
    targets = [attrs.evolve(target_of("http://127.0.0.1:1"), name=name) for name in (OURS, BASE)]
    notes: list[str] = []
    found = proof.rounds_in_time(targets, Broken(), 2, math.inf, notes.append)
    assert [sample.failed for sample in found[OURS]] == [1, 1]
    assert [sample.notes[0] for sample in found[BASE]] == ["broken round 0", "broken round 1"]
    order = [note.rpartition(" ")[2] for note in notes]
    assert order == [OURS, BASE, BASE, OURS]
    once = proof.rounds_in_time(targets, Broken(), 9, -math.inf, notes.append)
    assert [len(found) for found in once.values()] == [1, 1]


def test_a_row_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_row(_options: object, model: Path, row: object, *_rest: object) -> list[proof.Result]:
        ran.append(row)
        if len(ran) == 1:
            raise ZeroDivisionError("once")
        found = samples([1.0], [1.0])
        verdict = judge(Check(text="t", metric="n", bound=1), found)
        return [proof.Result(model="m", row="r", scenario="s", verdicts=(verdict,))]

    ran: list[object] = []
    monkeypatch.setattr(proof, "run_row", run_row)
    model = tmp_path / "m.gguf"
    model.touch()
    flags = ["--model", str(model), "--out", str(tmp_path / "o"), "--quiet"]
    assert proof.main([*flags, "--rows", "single,chats"]) == 1
    assert len(ran) == 2
    assert "1 met, 0 missed, 0 not measured, 1 rows failed" in capsys.readouterr().out
    assert proof.main([*flags, "--rows", "single"]) == 0
    assert proof.main([*flags, "--rows", "single", "--budget", "1e-9"]) == 1
    assert len(ran) == 3
    assert "--budget were used up" in (tmp_path / "o" / "results.md").read_text()


@pytest.mark.system
def test_a_server_that_ends_at_once_is_noticed(tmp_path: Path) -> None:
    command = Command("gone", ("python3", "-c", "import sys; print('no model'); sys.exit(3)"))
    flags = Flags(model=tmp_path / "m.gguf")
    with (
        pytest.raises(TargetError, match=r"(?s)ended with code 3.*no model"),
        running(command, flags, tmp_path / "log"),
    ):
        pytest.fail("it never ran")
