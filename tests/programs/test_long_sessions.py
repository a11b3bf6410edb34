"""Coding agents whose context fills twice: nothing of the task is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from tests.programs.running import bin_of, calls_in, environment_of, launching, run, served
from tests.programs.table import Works
from trioserve.chat.compaction import TASK
from trioserve.testing.scripts import write_hermes

pytestmark = pytest.mark.system

N_CALLS = 30
FACT = "codeword-zebra"
PROMPT = f"Remember {FACT}. Run thirty commands, one by one."

#: Phrases in the prompts for a summary: ours, Codex's, Claude Code's.
_SUMMARY = re.compile(rf"{re.escape(TASK[:40])}|CONTEXT CHECKPOINT|detailed summary of")


@attrs.define
class Session:
    """A model that runs commands with long output, and writes a summary when asked."""

    tool: str
    argument: str
    n_calls: int = 0
    n_summaries: int = 0
    n_lost: int = 0

    def __call__(self, prompt: str) -> str:
        """Write what follows the prompt."""
        if _SUMMARY.search(prompt[-12_000:]):
            self.n_summaries += 1
            facts = ", ".join(dict.fromkeys(re.findall(r"codeword-\w+", prompt)))
            return f"<summary>The user said: {facts}; {self.n_calls} calls made.</summary>"
        if "<tools>" not in prompt:
            return "A chat"
        self.n_lost += FACT not in prompt
        if self.n_calls == N_CALLS:
            return "All done."
        self.n_calls += 1
        command = f"head -c 3500 /dev/zero | tr '\\0' 'z'; echo {self.n_calls} >> log.txt"
        return write_hermes([(self.tool, {self.argument: command, "description": "Adds a line"})])


CODEX = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT]
#: With this name of a provider, Codex asks the server for compactions.
ASKING = ["-c", 'model_providers.trioserve.name="OpenAI"', *CODEX]
CLAUDE = ["-p", "--dangerously-skip-permissions", PROMPT]


@pytest.mark.parametrize(
    ("name", "tool", "argument", "n_ctx", "arguments"),
    [
        ("codex", "exec_command", "cmd", 85_000, CODEX),
        ("codex", "exec_command", "cmd", 85_000, ASKING),
        ("claude", "Bash", "command", 130_000, CLAUDE),
    ],
    ids=["codex", "codex that asks", "claude"],
)
async def test_a_context_that_fills_twice(
    name: str,
    tool: str,
    argument: str,
    n_ctx: int,
    arguments: Sequence[str],
    tmp_path: Path,
    works: Works,
) -> None:
    bin_of(name)
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    model = Session(tool, argument)
    async with served(model, n_ctx=4 * n_ctx, n_ctx_seq=n_ctx) as server:
        ended = await run(
            launching(name, server.url, *arguments),
            folder=folder,
            environ=environment_of(name, home=home, IS_SANDBOX="1"),
            patience=400,
        )
    assert ended.code == 0, ended.output
    assert server.refused == [], calls_in(server.exchanges)
    assert (folder / "log.txt").read_text().split() == [str(i + 1) for i in range(N_CALLS)]
    assert (model.n_calls, model.n_lost) == (N_CALLS, 0)
    assert model.n_summaries >= 2
    works(name, "a context that fills twice" + (", compacted here" if arguments is ASKING else ""))
