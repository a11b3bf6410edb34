"""Examples in the docs: the flags of commands exist, and the requests and programs run."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from PIL import Image

from tests.support.command import serving
from tests.support.docs_examples import REASONS, ROOT, Example, commands_in, examples
from tests.support.media_files import wav_file
from tests.support.pdf_files import pdf_file
from tests.support.speech_models import write_pocket
from trioserve.cli.agents import AGENTS
from trioserve.cli.commands import COMMANDS, SERVE
from trioserve.cli.options import arguments
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR

SHELL, PYTHON = examples("sh"), examples("python")

#: Programs of others, and of the system. `make test-clients` and `make test-deploy` run most.
OTHERS = re.compile(
    "aiperf|caddy|cd|cmake|cp|docker|echo|export|guidellm|helm|hypercorn|install|kubectl|launchctl|"
    "lm_eval|nginx|ollama|openapi-python-client|(.*/)?pip|pipx|python3|serve|systemctl|tar|uvx|vllm"
)
AGENT_PROGRAMS = frozenset(one.program for one in AGENTS.values())

#: Errors about files, folders and extras that this machine lacks.
_ELSEWHERE = re.compile("is not a directory|No such file|: install trioserve")

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def is_request(words: list[str]) -> bool:
    return words[0] == "curl"


def check(words: list[str]) -> None:
    """Check a command without running it."""
    name, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if name == "trioserve":
        check_trioserve(rest)
    elif name == "make":
        for word in rest:
            known = rf"^{word}:" if "=" not in word else rf"\b{word.partition('=')[0]}\b"
            assert re.search(known, MAKEFILE, re.MULTILINE), f"make has no {word}"
    elif name == "python" and rest[0] == "-m":
        check_module(rest[1], rest[2:])
    else:
        assert is_request(words) or name in AGENT_PROGRAMS or OTHERS.fullmatch(name), name
    for extras in re.findall(r"(?:trioserve|\.|whl)\[(\w[\w,]*)\]", " ".join(words)):
        assert set(extras.split(",")) <= EXTRAS.keys()
    if "pip" in name and "install" in rest:
        assert not re.search(r"\btrioserve(\[|$|')", " ".join(rest)), "it is not released yet"


def check_trioserve(words: list[str]) -> None:
    name = words[0] if words and not words[0].startswith("-") else SERVE
    words = words[1:] if words[:1] == [name] else words
    command = COMMANDS[name]
    if command.actions:
        name, command, words = f"{name} {words[0]}", command.actions[words[0]], words[1:]
    given = arguments(name, command, words, {})
    try:
        assert parse(given.flags, {}).notes == ()
    except ConfigError as error:
        if not _ELSEWHERE.search(error.message):
            raise


def check_module(module: str, words: list[str]) -> None:
    """Check that a program of the repository has the flags that a page gives it."""
    path = ROOT / module.replace(".", "/")
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.rglob("*.py")
    shared = (ROOT / "benchmarks").glob("*.py") if module.startswith("benchmarks") else ()
    source = "".join(file.read_text(encoding="utf-8") for file in (*files, *shared))
    assert source, f"there is no {module}"
    for word in words:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in source, (module, word)


@pytest.mark.parametrize("example", SHELL, ids=str)
def test_a_command_has_the_flags_that_a_page_gives_it(example: Example) -> None:
    commands = list(example.commands())
    assert commands
    for words in commands:
        check(words)


def test_blocks_are_copied_without_prompts() -> None:
    assert [str(one) for one in SHELL if re.search(r"^\s*[$>] ", one.text, re.MULTILINE)] == []
    assert examples("console") == examples("bash") == []


def test_few_examples_are_not_run_and_each_says_why() -> None:
    marked = [one for one in (*SHELL, *PYTHON) if one.why_not]
    assert {one.why_not for one in marked} <= REASONS.keys()
    assert len(marked) <= 16


# -- running them

REQUESTS = [one for one in SHELL if not one.why_not and any(map(is_request, one.commands()))]
PROGRAMS = [one for one in PYTHON if not one.why_not]
FILES = [
    (ROOT / "examples" / name, given)
    for name, given in (
        ("agent.py", ()),
        ("client_openai.py", ("{url}/v1",)),
        ("curl.sh", ("{url}",)),
        ("models.py", ()),
        ("pictures.py", (str(BUNDLED), str(BUNDLED_PROJECTOR), "picture.png")),
        ("program.py", ()),
        ("remote.py", ("{url}",)),
    )
]

#: Makes requests in the docs fail if the status of the answer is an error.
_CURL = 'curl() { command curl --silent --show-error --fail-with-body --max-time 60 "$@"; }'

#: A function of a page that takes a server, and examples of what else it takes.
_CALL = """
import inspect, trio, trioserve
GIVEN = {"questions": ["Hi", "Ho"], "question": "Hi", "tools": [], "path": "picture.png",
         "sound": open("sound.wav", "rb").read()}
async def call(function):
    async with trioserve.Server(trioserve.Config(model=MODEL, mmproj=PROJECTOR)) as server:
        names = [*inspect.signature(function).parameters][1:]
        await function(server, *(GIVEN[name] for name in names))
trio.run(call, FUNCTION)
"""


def at(text: str, url: str) -> str:
    return re.sub(r"(http://)?(127\.0\.0\.1|localhost):8080", url, text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "picture.png")
    for name in ("sound.wav", "meeting.mp3"):
        (tmp_path / name).write_bytes(wav_file(0.5))
    (tmp_path / "README.md").write_text("# Title\n")
    (tmp_path / "report.pdf").write_bytes(pdf_file("Hello"))
    line = {"custom_id": "one", "url": "/v1/chat/completions", "method": "POST"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    (tmp_path / "input.jsonl").write_text(json.dumps({**line, "body": body}) + "\n")
    return tmp_path


async def run(command: list[str], folder: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    with trio.fail_after(45):
        done = await trio.run_process(
            command, cwd=folder, env=environ, check=False, capture_stdout=True, capture_stderr=True
        )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-3000:]


def scripts_of(url: str) -> Iterator[tuple[str, list[str]]]:
    """The name and the command of each example that needs a server."""
    for one in REQUESTS:
        requests = [line for line in commands_in(one.text) if line.startswith("curl")]
        yield str(one), ["bash", "-ec", at("\n".join([_CURL, *requests]), url)]
    for one in PROGRAMS:
        if "8080" in one.text:
            yield str(one), [sys.executable, "-c", at(one.text, url)]
    for path, given in FILES:
        if any("{url}" in word for word in given):
            program = [sys.executable] if path.suffix == ".py" else ["sh"]
            yield path.name, [*program, str(path), *(word.format(url=url) for word in given)]


@pytest.mark.system
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_requests_and_clients_of_the_pages(folder: Path) -> None:
    failed = []  # in the order of the page, since some examples need the result of an earlier one
    flags = ("--tools", "read_file,grep_search,edit_file", "--slot-save-path", str(folder))
    (voices := folder / "voices").mkdir()
    (voices / "ada.wav").write_bytes(wav_file(1.0))
    speech = ("--tts", str(write_pocket(folder).model), "--tts-voices", str(voices))
    more = ("--metrics", "-c", "32768", "--mmproj", str(BUNDLED_PROJECTOR), *speech)
    async with serving("-m", str(BUNDLED), *flags, *more, timeout=600) as running:
        for name, command in scripts_of(running.url):
            try:
                await run(command, folder)
            except (AssertionError, trio.TooSlowError) as error:
                failed.append(f"{name}: {error}")
    assert failed == []


@pytest.mark.system
@pytest.mark.parametrize("example", [o for o in PROGRAMS if "8080" not in o.text], ids=str)
async def test_programs_of_the_pages(example: Example, folder: Path) -> None:
    text = example.text
    function = re.search(r"^async def (\w+)\(server: trioserve.Server", text, re.MULTILINE)
    if function is not None and "trio.run(" not in text:
        text += f"MODEL, PROJECTOR = {str(BUNDLED)!r}, {str(BUNDLED_PROJECTOR)!r}\n"
        text += _CALL.replace("FUNCTION", function[1])
    await run([sys.executable, "-c", text], folder)


@pytest.mark.system
@pytest.mark.parametrize(("path", "given"), [(p, g) for p, g in FILES if "{url}" not in str(g)])
async def test_programs_of_the_examples(path: Path, given: tuple[str, ...], folder: Path) -> None:
    await run([sys.executable, str(path), *given], folder)
