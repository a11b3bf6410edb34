"""Progress of loads and of downloads."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import structlog

from tests.support.command import Terminal
from trioserve.children.reports import decode
from trioserve.cli import progress
from trioserve.cli.progress import DownloadReport, EarlyLoad, LoadReport, Reporter, load
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama.rpc import library
from trioserve.models.hub import DownloadProgress


def test_a_load_on_a_terminal_is_one_line_that_changes() -> None:
    stream = Terminal()
    report = LoadReport("x.gguf", stream, patience=0)
    report(0.25)
    report(1.0)
    report.end()
    assert stream.getvalue() == "\rLoading x.gguf:  25%\x1b[K\rLoading x.gguf: 100%\x1b[K\r\x1b[K"


@pytest.mark.parametrize(("patience", "percents"), [(0, [25, 50, 100]), (60, [])])
def test_a_slow_load_elsewhere_is_a_log_line_each_quarter(
    patience: float, percents: list[int]
) -> None:
    with structlog.testing.capture_logs() as lines:
        report = LoadReport("x.gguf", io.StringIO(), patience=patience)
        for share in (0.1, 0.3, 0.4, 0.6, 1.0):
            report(share)
        report.end()
    assert [line["percent"] for line in lines] == percents


def loaded_with(
    monkeypatch: pytest.MonkeyPatch, load_model: Any, **fields: Any
) -> tuple[list[int], list[str]]:
    """Load with other machines; returns the exit codes of this process, and the order of things."""
    exits: list[int] = []
    order: list[str] = []

    def exit_with(code: int) -> None:
        exits.append(code)
        ended.set()

    ended = threading.Event()
    monkeypatch.setattr(progress.os, "_exit", exit_with)
    monkeypatch.setattr(library, "connect", lambda config: order.append(f"connect {config.rpc}"))
    monkeypatch.setattr(progress.llama, "load", lambda _, progress: load_model(progress, ended))
    config = Config(rpc=("10.0.0.1:50052",), **fields)
    parent = Mock(send=lambda payload: order.append(str(decode(payload))))
    assert load(Reporter(parent), config) == "the model"  # type: ignore[comparison-overlap]
    return exits, order


def test_a_load_that_stands_still_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_still(progress: Any, ended: threading.Event) -> str:
        progress(0.5)
        assert ended.wait(10)
        return "the model"

    exits, order = loaded_with(monkeypatch, stand_still, watchdog_timeout=0.05)
    assert exits == [1]
    assert order[0] == "connect ('10.0.0.1:50052',)"
    assert "Failed(message='Loading the model has made no progress for 0.05 sec" in order[-1]


@pytest.mark.parametrize("seconds", [0.0, 120.0])
def test_a_load_that_goes_on_does_not(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    def go_on(progress: Any, _ended: threading.Event) -> str:
        assert progress(0.5)
        return "the model"

    exits, order = loaded_with(monkeypatch, go_on, watchdog_timeout=seconds)
    assert exits == []
    assert order[1:] == ["Loading(progress=0.5)"]
    assert not any(one.name == "trioserve-loading" for one in threading.enumerate())


# -- a load that begins before it is asked for


class Loads:
    """A loader that waits in the middle for `went_on`."""

    def __init__(self) -> None:
        self.went_on = threading.Event()
        self.half = threading.Event()
        self.n_closed = self.n_loads = self.n_loaded = 0

    def __call__(self, config: Config, *, progress: Any = None) -> Any:
        self.n_loads += 1
        progress(0.5)
        self.half.set()
        assert self.went_on.wait(60)
        if not progress(1.0):
            raise ModelLoadError("cancelled")
        self.n_loaded += 1
        return self

    def close(self) -> None:
        self.n_closed += 1


def test_a_load_that_began_early_is_the_one_that_is_asked_for() -> None:
    loads = Loads()
    early = EarlyLoad(loads, Config())
    assert loads.half.wait(60)
    shares: list[float] = []

    def note(share: float) -> bool:
        shares.append(share)
        loads.went_on.set()
        return True

    assert early(Config(), progress=note) is loads  # type: ignore[comparison-overlap]
    assert (shares, loads.n_loads) == ([0.5, 1.0], 1)
    early(Config(), progress=note)
    assert loads.n_loads == 2, "a model that was unloaded is loaded again"
    early.close()
    assert loads.n_closed == 0
    assert not any(one.name.startswith("trioserve-loading") for one in threading.enumerate())


@pytest.mark.parametrize("last", [0.5, 1.0])
def test_an_early_load_is_cancelled(last: float) -> None:
    """After its last report of progress, the model is there, and is freed."""
    loads = Loads()
    early = EarlyLoad(loads, Config())

    def cancel(share: float) -> bool:
        loads.went_on.set()
        if share == last:
            raise InterruptedError
        return True

    with pytest.raises(InterruptedError):
        early(Config(), progress=cancel)
    early.close()
    assert loads.n_closed == loads.n_loaded >= (last == 1.0)


def test_an_early_load_that_is_not_asked_for_is_freed() -> None:
    loads = Loads()
    early = EarlyLoad(loads, Config())
    assert loads.half.wait(60)
    loads.went_on.set()
    early.close()
    assert loads.n_closed == loads.n_loaded and loads.n_loads == 1


def test_an_early_load_that_fails_raises_when_it_is_asked_for() -> None:
    def fail(config: Config, *, progress: Any = None) -> Any:
        raise ModelLoadError("no such file")

    early = EarlyLoad(fail, Config())
    with pytest.raises(ModelLoadError, match="no such file"):
        early(Config())
    early.close()


# -- downloads

WHAT = "Downloading m-Q8_0.gguf"


def at(done: int, total: int = 2_000_000_000, name: str = "m-Q8_0.gguf") -> DownloadProgress:
    url = f"https://hub/user/repo/resolve/main/{name}?x=1"
    return DownloadProgress(url=url, done=done, total=total, all_done=done, all_total=total)


@pytest.fixture
def downloaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Report a download; gives the output. Ten seconds pass between two reports."""
    monkeypatch.setenv("COLUMNS", "200")
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress, "monotonic", lambda: next(seconds))

    def write(stream: io.StringIO, *reports: DownloadProgress, **options: int) -> str:
        with DownloadReport(stream, **options) as report:
            for each in reports:
                report(each)
        return stream.getvalue()

    return write


def test_a_download_on_a_terminal_is_a_bar(downloaded: Callable[..., str]) -> None:
    text = downloaded(Terminal(), at(0), at(500_000_000), at(2_000_000_000))
    assert text.split("\r") == [
        "",
        f"{WHAT}: [                    ]   0% of 1.9 GiB, 0 bytes/s\x1b[K",
        f"{WHAT}: [#####               ]  25% of 1.9 GiB, 47.7 MiB/s, 30 s left\x1b[K",
        f"{WHAT}: [####################] 100% of 1.9 GiB, 95.4 MiB/s\x1b[K",
        "\x1b[K",
    ]


def test_long_names_and_long_times_are_made_short(downloaded: Callable[..., str]) -> None:
    text = downloaded(Terminal(), at(0, 10**12), at(10**9, 10**12, "x" * 50 + "-Q8_0.gguf"))
    assert f"{'x' * 18}…{'x' * 11}-Q8_0.gguf: [" in text
    assert "2 h 46 min left" in text


def test_a_narrow_terminal_has_what_fits(
    downloaded: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert downloaded(Terminal(), at(0)).split("\r")[1] == f"{WHAT}: [   \x1b[K"


def test_a_download_elsewhere_is_a_line_at_intervals(downloaded: Callable[..., str]) -> None:
    text = downloaded(io.StringIO(), at(0), at(250_000_000), at(290_000_000))
    assert text.splitlines() == [
        f"{WHAT}: [##                  ]  12% of 1.9 GiB, 23.8 MiB/s, 1 min 10 s left",
        f"{WHAT}: [##                  ]  14% of 1.9 GiB, 13.8 MiB/s, 1 min 58 s left",
    ]


def test_a_download_of_a_server_is_a_log_line_each_tenth(downloaded: Callable[..., str]) -> None:
    reports = map(at, (0, 250_000_000, 290_000_000, 450_000_000, 2_000_000_000))
    with structlog.testing.capture_logs() as lines:
        downloaded(io.StringIO(), *reports, n_log_lines=10)
    assert [line["percent"] for line in lines] == [10, 20, 100]
    assert (lines[0]["event"], lines[0]["file"]) == ("downloading", "m-Q8_0.gguf")


def test_a_download_of_unknown_size_has_no_percentage(downloaded: Callable[..., str]) -> None:
    text = downloaded(Terminal(), at(0, 0), at(10**9, 0))
    assert f"{WHAT}: 954 MiB, 95.4 MiB/s\x1b[K" in text
