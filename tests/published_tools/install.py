"""Get the tools of published MCP servers: ``python -m tests.published_tools.install FOLDER``.

npm installs the packages into the folder, in the versions named here; each server is then started
once and asked for its tools, which are kept beside the packages. A server that npm does not offer,
or that does not answer, is named and left out. Nothing of them becomes part of trioserve.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Seconds for npm, for all packages, and for one server to list its tools.
_INSTALL_SECONDS, _LIST_SECONDS = 400, 30

#: Versions, arguments, and variables that a server insists on.
SERVERS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "@browserbasehq/mcp-server-browserbase": (
        "2.4.3",
        [],
        {"BROWSERBASE_API_KEY": "x", "BROWSERBASE_PROJECT_ID": "x", "GEMINI_API_KEY": "x"},
    ),
    "@elastic/mcp-server-elasticsearch": (
        "0.3.1",
        [],
        {"ES_URL": "http://localhost:9", "ES_API_KEY": "x"},
    ),
    "@modelcontextprotocol/server-brave-search": ("0.6.2", [], {"BRAVE_API_KEY": "x"}),
    "@modelcontextprotocol/server-everything": ("2026.8.31", [], {}),
    "@modelcontextprotocol/server-filesystem": ("2026.8.31", ["/tmp"], {}),
    "@modelcontextprotocol/server-github": ("2025.4.8", [], {}),
    "@modelcontextprotocol/server-gitlab": (
        "2025.4.25",
        [],
        {"GITLAB_PERSONAL_ACCESS_TOKEN": "x"},
    ),
    "@modelcontextprotocol/server-google-maps": ("0.6.2", [], {"GOOGLE_MAPS_API_KEY": "x"}),
    "@modelcontextprotocol/server-memory": ("2026.8.31", [], {}),
    "@modelcontextprotocol/server-postgres": ("0.6.2", ["postgresql://localhost/x"], {}),
    "@modelcontextprotocol/server-puppeteer": ("2025.5.12", [], {}),
    "@modelcontextprotocol/server-sequential-thinking": ("2026.8.31", [], {}),
    "@modelcontextprotocol/server-slack": (
        "2025.4.25",
        [],
        {"SLACK_BOT_TOKEN": "x", "SLACK_TEAM_ID": "T"},
    ),
    "@notionhq/notion-mcp-server": ("2.5.2", [], {"NOTION_TOKEN": "ntn_x"}),
    "@playwright/mcp": ("0.0.83", [], {}),
    "@sentry/mcp-server": ("0.36.0", ["--access-token=x"], {}),
    "@shopify/dev-mcp": ("1.16.0", [], {}),
    "@softeria/ms-365-mcp-server": ("0.155.0", [], {}),
    "@upstash/context7-mcp": ("4.1.1", [], {}),
    "@wonderwhy-er/desktop-commander": ("0.2.52", [], {}),
    "@zereight/mcp-gitlab": ("2.1.64", [], {"GITLAB_PERSONAL_ACCESS_TOKEN": "x"}),
    "airtable-mcp-server": ("1.14.0", [], {"AIRTABLE_API_KEY": "x"}),
    "chrome-devtools-mcp": ("1.11.0", [], {}),
    "exa-mcp-server": ("3.4.1", [], {"EXA_API_KEY": "x"}),
    "figma-developer-mcp": ("0.13.2", ["--stdio", "--figma-api-key=x"], {}),
    "firecrawl-mcp": ("3.22.2", [], {"FIRECRAWL_API_KEY": "fc-x"}),
    "mcp-server-kubernetes": ("4.1.7", [], {}),
    "mongodb-mcp-server": ("3.0.4", [], {"MDB_MCP_TELEMETRY": "disabled"}),
    "tavily-mcp": ("0.2.22", [], {"TAVILY_API_KEY": "x"}),
}


def install(folder: Path) -> list[str]:
    """Install the packages and list their tools, where that is not done yet.

    Returns what is missing, and why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: SERVERS[name] for name in SERVERS if not _file(folder, name).exists()}
    if not missing:
        return []
    (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
    command = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--legacy-peer-deps",
    ]
    command += ["--loglevel=error", *(f"{name}@{one[0]}" for name, one in missing.items())]
    try:
        subprocess.run(command, cwd=folder, check=True, timeout=_INSTALL_SECONDS, stdout=sys.stderr)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"npm: {error}"]
    problems = []
    for name, (_, arguments, environment) in missing.items():
        try:
            tools = _tools_of(folder, name, arguments, environment)
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{name}: {error!r}")
            continue
        _file(folder, name).write_text(json.dumps(tools), encoding="utf-8")
    return problems


def tools_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The schemas of all tools that were listed, by package and name."""
    return {
        f"{name} {tool['name']}": tool["inputSchema"]
        for name in SERVERS
        if _file(folder, name).exists()
        for tool in json.loads(_file(folder, name).read_text(encoding="utf-8"))
    }


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '_')}-{SERVERS[name][0]}.json"


def _tools_of(
    folder: Path, name: str, arguments: Sequence[str], environment: dict[str, str]
) -> list[Any]:
    """Start a server, and ask it for its tools.

    Raises:
        OSError, ValueError, KeyError: it does not start, or does not answer.
    """
    package = folder / "node_modules" / name
    program = json.loads((package / "package.json").read_text(encoding="utf-8"))["bin"]
    program = program if isinstance(program, str) else next(iter(program.values()))
    home = folder / "home"
    home.mkdir(exist_ok=True)
    process = subprocess.Popen(
        ["node", str(package / program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
    )
    timer = threading.Timer(_LIST_SECONDS, process.kill)
    timer.start()
    try:
        client = {"name": "trioserve-tests", "version": "1"}
        initialize = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        _ask(process, 1, "initialize", initialize)
        _send(process, {"method": "notifications/initialized"})
        tools: list[Any] = []
        params: dict[str, Any] = {}
        while True:
            page = _ask(process, 2, "tools/list", params)
            tools += page["tools"]
            if not page.get("nextCursor"):
                return tools
            params = {"cursor": page["nextCursor"]}
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def _send(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    process.stdin.flush()


def _ask(process: subprocess.Popen[bytes], id: int, method: str, params: Any) -> Any:
    _send(process, {"id": id, "method": method, "params": params})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"{") and (answer := json.loads(line)).get("id") == id:
            return answer["result"]
    raise ValueError("it has ended, or took too long")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.published_tools.install",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("folder", type=Path, help="where packages and tools are kept")
    folder = parser.parse_args(argv).folder
    for problem in install(folder):
        print(f"left out: {problem}", file=sys.stderr)
    print(f"{len(tools_in(folder))} tools of published servers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
