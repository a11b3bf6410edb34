"""What is said while a model is downloaded."""

from __future__ import annotations

import io

import pytest
from structlog.testing import capture_logs

from tests.support.command import Terminal
from trioserve.cli import progress
from trioserve.cli.progress import DownloadReport
from trioserve.models.hub import DownloadProgress

WHAT = "Downloading m-Q8_0.gguf"


def at(done: int, total: int = 2_000_000_000, name: str = "m-Q8_0.gguf") -> DownloadProgress:
    url = f"https://hub/user/repo/resolve/main/{name}?x=1"
    return DownloadProgress(url=url, done=done, total=total, all_done=done, all_total=total)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress, "monotonic", lambda: next(seconds))


def test_progress_on_a_terminal_is_a_bar() -> None:
    stream = Terminal()
    with DownloadReport(stream) as report:
        report(at(0))
        report(at(500_000_000))
        report(at(2_000_000_000))
    assert stream.getvalue().split("\r") == [
        "",
        f"{WHAT}: [                    ]   0% of 1.9 GiB, 0 bytes/s\x1b[K",
        f"{WHAT}: [#####               ]  25% of 1.9 GiB, 47.7 MiB/s, 30 s left\x1b[K",
        f"{WHAT}: [####################] 100% of 1.9 GiB, 95.4 MiB/s\x1b[K",
        "\x1b[K",
    ]


def test_long_names_and_long_times_are_made_short() -> None:
    stream = Terminal()
    with DownloadReport(stream) as report:
        report(at(0, 10**12))
        report(at(10**9, 10**12, "x" * 50 + "-Q8_0.gguf"))
    assert f"{'x' * 18}…{'x' * 11}-Q8_0.gguf: [" in stream.getvalue()
    assert "2 h 46 min left" in stream.getvalue()


def test_a_narrow_terminal_has_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with DownloadReport(stream) as report:
        report(at(0))
    assert stream.getvalue().split("\r")[1] == f"{WHAT}: [   \x1b[K"


def test_progress_elsewhere_is_a_line_at_intervals() -> None:
    stream = io.StringIO()
    with DownloadReport(stream) as report:
        for done in (0, 250_000_000, 290_000_000):
            report(at(done))
    assert stream.getvalue().splitlines() == [
        f"{WHAT}: [##                  ]  12% of 1.9 GiB, 23.8 MiB/s, 1 min 10 s left",
        f"{WHAT}: [##                  ]  14% of 1.9 GiB, 13.8 MiB/s, 1 min 58 s left",
    ]


def test_progress_of_a_server_is_a_log_line_each_tenth() -> None:
    with capture_logs() as lines, DownloadReport(io.StringIO(), n_log_lines=10) as report:
        for done in (0, 250_000_000, 290_000_000, 450_000_000, 2_000_000_000):
            report(at(done))
    assert [line["percent"] for line in lines] == [10, 20, 100]
    assert (lines[0]["event"], lines[0]["file"]) == ("downloading", "m-Q8_0.gguf")


def test_a_size_that_nobody_knows_is_no_percentage() -> None:
    stream = Terminal()
    with DownloadReport(stream) as report:
        report(at(0, 0))
        report(at(10**9, 0))
    assert f"{WHAT}: 954 MiB, 95.4 MiB/s\x1b[K" in stream.getvalue()
