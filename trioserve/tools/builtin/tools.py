"""`BuiltinTools`: the built-in tools that a configuration has switched on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import attrs

from trioserve.config import Config
from trioserve.tools.builtin.commands import ExecShellCommand, GetInfo
from trioserve.tools.builtin.file_tools import (
    EditFile,
    FileCall,
    FileThreads,
    FileTool,
    ReadFile,
    WriteFile,
)
from trioserve.tools.builtin.search import FindFiles, GrepFiles
from trioserve.tools.files.store import FileStore
from trioserve.tools.process import has_landlock
from trioserve.tools.runtime import Runtime, Runtimes, open_runtimes
from trioserve.tools.sandbox import PathSandbox
from trioserve.tools.tool import Tool, ToolCallContext, ToolSource

_FILE_TOOLS: tuple[type[FileCall], ...] = (ReadFile, FindFiles, GrepFiles, WriteFile, EditFile)

#: Tools that no file is named to.
_NO_FILES = {one.info.name: one for one in (ExecShellCommand, GetInfo)}


@attrs.frozen
class BuiltinTools(ToolSource):
    """The built-in tools that are on, by name, in llama-server's order."""

    tools: Mapping[str, Tool]
    sandbox: PathSandbox
    runtimes: Runtimes
    #: The configured place where they run; None: this machine.
    runtime: str | None = None

    def check(self, context: ToolCallContext) -> None:
        self.runtimes.find(context.runtime).check(context.cwd)

    def abilities(self) -> list[str]:
        shell = ExecShellCommand.info.name
        files = [tool for name, tool in self.tools.items() if name not in _NO_FILES]
        verbs = [verb for verb, writes in (("read", False), ("write", True))
                 if any(tool.info.writes == writes for tool in files)]  # fmt: skip
        sentences = []
        if files:
            names = ", ".join(tool.info.name for tool in files)
            sentences.append(
                f"The model and clients may {' and '.join(verbs)} files {self._where}: {names}."
            )
        if shell in self.tools:
            sentences.append(f"The model and clients may run commands {self._where}: "
                             f"{shell}.{self._warning}")  # fmt: skip
        return sentences

    @property
    def _where(self) -> str:
        if self.runtime is not None:
            return f"in {self.runtime}"
        return "anywhere" if self.sandbox.is_open else "in " + ", ".join(self.sandbox.folders)

    @property
    def _warning(self) -> str:
        if self.runtime is not None or self.sandbox.is_open or has_landlock():
            return ""
        return " The system cannot confine them to that (it has no Landlock)."


@asynccontextmanager
async def open_builtin_tools(config: Config) -> AsyncIterator[BuiltinTools]:
    """Open the built-in tools that are on.

    Raises:
        ToolRuntimeError: they cannot run where they are to run.
    """
    sandbox = PathSandbox(config.tools_dir)
    threads = FileThreads()
    async with open_runtimes(config, sandbox) as runtimes:

        def runtime_of(context: ToolCallContext) -> Runtime:
            return runtimes.find(context.runtime)

        def stores(context: ToolCallContext) -> FileStore:
            return runtime_of(context).files(context.cwd)

        tools: dict[str, Tool] = {one.NAME: FileTool(one, stores, threads) for one in _FILE_TOOLS}
        tools |= {name: one(runtime_of) for name, one in _NO_FILES.items()}
        used = {name: tools[name] for name in config.builtin_tools if name in tools}
        yield BuiltinTools(used, sandbox, runtimes, config.tools_runtime)
