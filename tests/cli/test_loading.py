"""What is said while a model loads."""

from __future__ import annotations

import io

import structlog

from tests.support.command import Terminal
from trioserve.cli.loading import LoadReport


def test_progress_on_a_terminal_is_one_line_that_changes() -> None:
    stream = Terminal()
    report = LoadReport("x.gguf", stream, patience=0)
    report(0.25)
    report(1.0)
    report.end()
    assert stream.getvalue() == "\rLoading x.gguf:  25%\rLoading x.gguf: 100%\r\x1b[K"


def test_progress_elsewhere_is_a_log_line_each_quarter() -> None:
    with structlog.testing.capture_logs() as lines:
        report = LoadReport("x.gguf", io.StringIO(), patience=0)
        for share in (0.1, 0.3, 0.4, 0.6, 1.0):
            report(share)
        report.end()
    assert [line["percent"] for line in lines] == [25, 50, 100]


def test_a_model_that_loads_quickly_is_not_reported() -> None:
    stream = Terminal()
    report = LoadReport("x.gguf", stream, patience=60)
    report(1.0)
    report.end()
    assert stream.getvalue() == ""
