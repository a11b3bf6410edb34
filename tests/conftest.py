"""What all tests share: the tiers that docs/testing.md describes, and what keeps tests apart."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
import trio
import trio.testing
from structlog.typing import Processor

from trioserve import left_out as left_out_module
from trioserve.models.tried import LoadedFiles

pytest.register_assert_rewrite("tests.support")

# A model in the hub's cache of this machine would turn `trioserve` into a router.
os.environ["HF_HUB_CACHE"] = str(Path(__file__).parent / "no-cache")

# No test talks to a host of the internet, and a client takes 20 ms to load certificates for that.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.environ["HF_HUB_CACHE"]

# Which files were loaded is no concern of the machine's user.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# A logger that keeps its configuration would keep that of the test that uses it first.
_configure_log = structlog.configure
structlog.configure = lambda **settings: _configure_log(
    **settings | {"cache_logger_on_first_use": False}
)

#: By default structlog draws tracebacks with their local variables, which takes most of a second.
_LOG_PROCESSORS: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
]
structlog.configure(processors=[*_LOG_PROCESSORS])

# The SDKs ask once which system this is, and `platform` runs `uname` for that: not in any one test.
platform.uname().processor  # noqa: B018

# The same examples in each run, however slow the machine is. `make fuzz` draws others.
hypothesis.settings.register_profile(
    "same",
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

#: Tests that need what a target of the Makefile installs, and the variable that it sets.
_OPTIONAL = {
    "api/test_media_reference.py": "LLAMA_SERVER",
    "api/test_vocabularies_reference.py": "LLAMA_SERVER",
    "deploy/test_chart.py": "TEST_DEPLOY",
    "deploy/test_gateway.py": "TEST_DEPLOY",
    "deploy/test_image.py": "TEST_IMAGE",
    "deploy/test_kuberay.py": "TEST_DEPLOY",
    "hostile": "TEST_HOSTILE",
    "llama/test_embedding_reference.py": "LLAMA_SERVER",
    "llama/test_heads_reference.py": "LLAMA_SERVER",
    "programs/test_agents.py": "TEST_CLIENTS",
    "programs/test_long_sessions.py": "TEST_CLIENTS",
    "programs/test_mcp_conformance.py": "TEST_CLIENTS",
    "programs/test_measuring.py": "TEST_CLIENTS",
    "programs/test_sdks.py": "TEST_CLIENTS",
    "programs/test_lm_eval.py": "TEST_CLIENTS",
    "programs/test_cohere.py": "TEST_CLIENTS",
    "programs/test_generated_client.py": "TEST_CLIENTS",
    "ray/test_rayservice.py": "TEST_RAY",
    "ray/test_request_router.py": "TEST_RAY",
    "ray_cluster": "TEST_RAY",
    "published_tools": "TEST_SCHEMAS",
    "real_models": "TEST_MODELS",
    "rpc": "TEST_RPC",
}
_LEFT_OUT = {path: name for path, name in _OPTIONAL.items() if not os.environ.get(name)}
collect_ignore = [*_LEFT_OUT]


class _LeftOutLog(list[tuple[str, str]]):
    """A logger that keeps its lines. A call returns those since the last call."""

    def info(self, event: str, *, what: str = "", why: str = "", **other: str) -> None:
        if what:
            self.append((what, why))

    def __call__(self) -> list[tuple[str, str]]:
        told = [*self]
        self.clear()
        return told


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, str]]]:
    """What the log says is left out of requests, as if nothing had been logged before."""
    log = _LeftOutLog()
    monkeypatch.setattr(left_out_module, "_log", log)
    monkeypatch.setattr(left_out_module, "_logged", set())
    return log


#: No garbage is looked for while thousands of tests are imported, and never among them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 1000)  # `_few_objects` collects the oldest
    gc.enable()


def pytest_report_header() -> list[str]:
    return [f"not collected without {name}: tests/{path}" for path, name in _LEFT_OUT.items()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out single tests of the same kind, which have the marker `needs`."""
    left_out = [
        item
        for item in items
        if not all(os.environ.get(mark.args[0]) for mark in item.iter_markers("needs"))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


#: The audit events of a program that starts.
_STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"}

#: The test that runs, and what it did that its tier does not allow.
_running: pytest.Item | None = None
_offences: list[str] = []


def _guard(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse to start a program in a fast test, and in any test whose clock is mocked."""
    if _running is None or event not in _STARTS:  # as the process ends, both are None
        return
    if not _running.get_closest_marker("system"):
        _offences.append(f"A fast test starts a program: {arguments[:2]}. Mark it as `system`.")
    elif _has_mocked_clock(_running):
        # Real programs take real time. A mocked clock lets hours pass meanwhile, or none.
        _offences.append(f"A test with a mocked clock starts a program: {arguments[:2]}.")
    else:
        return
    raise RuntimeError(_offences[-1])


def _has_mocked_clock(item: pytest.Item) -> bool:
    if {"mock_clock", "autojump_clock"} & set(getattr(item, "fixturenames", ())):
        return True
    try:
        return isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
    except RuntimeError:  # outside of Trio
        return False


sys.addaudithook(_guard)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _running
    _running = item
    try:
        return (yield)
    finally:
        _running = None


@pytest.fixture(autouse=True)
def _tier() -> Iterator[None]:
    """Fail a test that did what its tier does not allow, even if the code under test caught it."""
    _offences.clear()
    yield
    assert not _offences, _offences[0]


#: Tests load files in this process at once, as if it had loaded them before.
_are_known = LoadedFiles.are_known
LoadedFiles.are_known = True  # type: ignore[assignment, method-assign]


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Do not look at what a module has left for garbage again and again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _new_files(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("new_files") is not None:
        monkeypatch.setattr(LoadedFiles, "are_known", _are_known)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Put the log back, so that no test sees the one that another has set up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.configure(processors=[*_LOG_PROCESSORS])
    structlog.contextvars.clear_contextvars()
