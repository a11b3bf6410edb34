"""The MCP conformance suite, with `trioserve mcp --http` and with the client of MCP servers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.programs.running import Ended, bin_of, environment_of, run
from tests.programs.table import Works
from tests.support.http_server import serving, serving_script
from trioserve.cli.mcp_http import mcp_app
from trioserve.config import Config
from trioserve.mcp_server.models import models_of_server

pytestmark = pytest.mark.system

NAME = "mcp-conformance"

#: They call tools that the suite defines and `trioserve mcp` lacks.
OF_THE_SUITE = (
    "tools-call-image", "tools-call-audio", "tools-call-embedded-resource",
    "tools-call-mixed-content", "tools-call-with-logging", "tools-call-with-progress",
    "tools-call-sampling", "tools-call-elicitation", "json-schema-2020-12",
    "elicitation-sep1034-defaults", "elicitation-sep1330-enums", "server-sse-polling",
)  # fmt: skip

#: Optional features of servers. `trioserve mcp` declares tools only.
OPTIONAL = (
    "logging-set-level", "completion-complete",
    "resources-list", "resources-read-text", "resources-read-binary", "resources-templates-read",
    "resources-subscribe", "resources-unsubscribe",
    "prompts-list", "prompts-get-simple", "prompts-get-with-args",
    "prompts-get-embedded-resource", "prompts-get-with-image",
)  # fmt: skip

#: It passes for any text, also for the one that there is no such tool.
MEANINGLESS = {"tools-call-simple-text"}

#: Scenarios of the client that apply. Those of `auth` need OAuth, which it does not have.
OF_THE_CLIENT = ("initialize", "tools_call", "sse-retry", "elicitation-sep1034-client-defaults")

#: A client that accepts a form with its defaults passes. Ours declines: it has no person to ask.
DECLINED = ("elicitation-sep1034-client-defaults",)


async def conformance(folder: Path, *arguments: str, **expected: tuple[str, ...]) -> Ended:
    """Run the suite. Fails if a scenario fails that is not expected to, or the other way around."""
    lines = [f"{side}:\n" + "".join(f"  - {one}\n" for one in names)
             for side, names in expected.items()]  # fmt: skip
    (folder / "expected.yml").write_text("".join(lines))
    command = ["node", str(bin_of(NAME) / "conformance"), *arguments]
    ended = await run(
        [*command, "--expected-failures", "expected.yml", "-o", "results"],
        folder=folder,
        environ=environment_of(NAME, home=folder),
    )
    assert ended.code == 0, ended.output
    return ended


async def test_the_server(tmp_path: Path, works: Works) -> None:
    async with (
        serving_script() as (url, _),
        models_of_server(url) as models,
        mcp_app(models, Config()) as app,
        serving(app) as base,
    ):
        ended = await conformance(
            tmp_path, "server", "--suite", "all", "--url", f"{base}/mcp",
            server=(*OF_THE_SUITE, *OPTIONAL),
        )  # fmt: skip
    passed = set(re.findall(r"^✓ ([\w-]+):", ended.output, re.MULTILINE))
    assert passed >= {"server-initialize", "tools-list", "dns-rebinding-protection"}, ended.output
    works(NAME, f"server: {', '.join(sorted(passed - MEANINGLESS))}")


@pytest.mark.parametrize("scenario", OF_THE_CLIENT)
async def test_the_client(scenario: str, tmp_path: Path, works: Works) -> None:
    client = f"{sys.executable} -m tests.programs.mcp_client"
    ended = await conformance(
        tmp_path, "client", "--command", client, "--scenario", scenario, client=DECLINED
    )
    if scenario in DECLINED:
        assert "Expected action 'accept', got 'decline'" in ended.output
        works(NAME, "client: elicitation (declines)")
    else:
        works(NAME, f"client: {scenario}")
