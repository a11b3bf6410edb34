"""The cluster that the tests share, and the table that is printed at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.ray_cluster.cluster import Cluster, Plan, running
from trioserve.models import BUNDLED

Report = Callable[[str, str], None]

_ROWS: list[tuple[str, str]] = []

#: Two models, each with three replicas: with as many nodes, there is one of each on a node.
PLAN = Plan(
    models={name: {"model": str(BUNDLED), "threads": 1, "parallel": 4} for name in ("ash", "oak")},
    options={"replicas": 3, "ingresses": 2},
)


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not os.environ.get("TEST_RAY"):
        pytest.skip("needs Ray: run `make test-ray`")
    with running(PLAN, tmp_path_factory.mktemp("ray") / "log") as cluster:
        yield cluster


@pytest.fixture
async def cluster(shared_cluster: Cluster) -> Cluster:
    """The cluster, with nothing missing and nothing running."""
    await shared_cluster.whole_after()
    await shared_cluster.free_after(10)
    return shared_cluster


@pytest.fixture(scope="session")
def report() -> Report:
    """Takes rows of the table: what was tried, and what came of it."""
    return lambda what, figure: _ROWS.append((what, figure))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ROWS:
        terminalreporter.section("measured")
        for what, figure in _ROWS:
            terminalreporter.write_line(f"| {what} | {figure} |")
