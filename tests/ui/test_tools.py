"""Tools that the server runs for the model of a chat: shown, asked for, and stopped on the page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving, serving_script
from tests.support.processes import all_processes, read
from tests.support.scripts import answering
from tests.support.trio_thread import TrioThread
from tests.ui import showcase
from tests.ui.hostile import HOSTILE
from tests.ui.test_hostile import assert_harmless
from tests.ui.test_looks import LOOKS, scrolls_sideways, shoot, violations
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.types import SamplingParams

pytestmark = pytest.mark.system

WEATHER = Path(__file__).parents[2] / "examples" / "mcp_weather.py"


@attrs.define
class Worker:
    """A model that calls a tool when it is asked something, and reports the result.

    Attributes:
        folder: what it may read and write in.
        words: what it says before it calls.
        name: of the tool.
        arguments: of the call.
    """

    folder: Path
    words: str = "I will try."
    name: str = "get_info"
    arguments: dict[str, Any] = attrs.Factory(dict)

    def will_call(self, name: str, **arguments: Any) -> None:
        """Call this tool from now on."""
        self.name, self.arguments = name, arguments

    def say(self, prompt: str) -> str:
        """Answer a prompt."""
        if "<tool_response>" in prompt.rsplit("user", 1)[-1]:
            return "That was it."
        call = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"{self.words}\n<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def tools_server(
    loop: TrioThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Worker]]:
    """The base URL of a server with all tools that are built in, and its model."""
    worker = Worker(tmp_path_factory.mktemp("work"))
    backend = answering(worker.say, n_ctx=262_144, n_ctx_seq=65_536, n_slots=4)
    backend.info = attrs.evolve(backend.info, name=showcase.MODEL)
    tools = {"tools": ("all",), "tools_dir": (str(worker.folder),)}
    with loop.open(serving_script(backend, **tools)) as (url, _):
        yield url, worker


@pytest.fixture
def worker(tools_server: tuple[str, Worker]) -> Worker:
    return tools_server[1]


@pytest.fixture
def chat(visitor: Visitor, tools_server: tuple[str, Worker]) -> ChatPage:
    """A page of that server, in a chat with all tools on."""
    chat = ChatPage(visitor.visit(tools_server[0]))
    with tools_of(chat) as panel:
        panel.get_by_role("button", name="All", exact=True).click()
    return chat


class tools_of:  # noqa: N801 (reads like a function)
    """The panel with the tools of the open chat, for as long as a block lasts."""

    def __init__(self, chat: ChatPage) -> None:
        self._page = chat.page
        chat.button(re.compile("^Tools")).click()

    def __enter__(self) -> Locator:
        return self._page.get_by_role("dialog", name="Tools")

    def __exit__(self, *_: object) -> None:
        self._page.keyboard.press("Escape")


def calls(chat: ChatPage) -> Locator:
    return chat.page.locator(".call")


# -- the list


def test_tools_are_chosen_for_a_chat_and_for_new_ones(chat: ChatPage, worker: Worker) -> None:
    with tools_of(chat) as panel:
        expect(panel.get_by_role("switch")).to_have_count(7)
        panel.get_by_role("button", name="None", exact=True).click()
        expect(panel.get_by_role("switch", checked=True)).to_have_count(0)
        panel.get_by_role("switch", name="Read file").check()
        panel.get_by_label("Folder").fill(str(worker.folder))
        panel.get_by_role("button", name="Use these for new chats").click()
        expect(panel.get_by_role("button", name="New chats begin with these")).to_be_disabled()
    worker.will_call("read_file", path="missing.txt")
    with chat.page.expect_request("**/chat/completions") as request:
        chat.ask("Read it.")
    asked = {"tools": ["read_file"], "approval": "ask", "cwd": str(worker.folder)}
    assert request.value.post_data_json["trioserve_run_tools"] == asked
    expect(calls(chat)).to_contain_text("failed")
    chat.begin()
    expect(chat.button("Tools: 1 of 7 on")).to_be_visible()


def test_a_server_without_tools_has_no_button_for_them(
    visitor: Visitor, server: tuple[str, object]
) -> None:
    chat = ChatPage(visitor.visit(server[0]))
    with chat.page.expect_response("**/props*"):
        chat.page.reload()
    chat.ask("Hello?")
    expect(chat.button(re.compile("^Tools"))).to_have_count(0)


# -- calls

#: Waits until what appears has appeared: while it does, its colors are too pale.
_STILL = """() => Promise.all(
    document.getAnimations()
        .filter((one) => one.effect.getComputedTiming().iterations !== Infinity)
        .map((one) => one.finished.catch(() => null))
).then(() => null)"""


def test_a_write_waits_and_is_shown_and_allowed(chat: ChatPage, worker: Worker) -> None:
    file = worker.folder / "list.txt"
    file.write_text("eggs\nmilk\n")
    worker.will_call("write_file", path="list.txt", content="eggs\nflour\n")
    chat.send("Flour in place of milk.")
    call = calls(chat)
    expect(call).to_contain_text("waits for your approval")
    expect(chat.page).to_have_title(re.compile(r"^\(1\) Flour in place of milk"))
    expect(call.locator("del")).to_have_text(re.compile("milk"))
    expect(call.locator("ins")).to_have_text(re.compile("flour"))
    chat.page.evaluate(_STILL)
    assert violations(chat.page) == []
    assert file.read_text() == "eggs\nmilk\n"
    chat.composer.focus()
    chat.button("Show").click()
    expect(call.get_by_role("button", name="Allow", exact=True)).to_be_focused()
    chat.page.keyboard.press("Enter")
    expect(chat.answers).to_contain_text(["That was it."])
    chat.wait_until_done()
    expect(chat.composer).to_be_focused()
    assert file.read_text() == "eggs\nflour\n"
    expect(call).to_contain_text(re.compile(r"\+1 .1"))
    expect(chat.page).to_have_title(re.compile("^Flour in place of milk"))


def test_a_write_that_is_denied_changes_nothing(chat: ChatPage, worker: Worker) -> None:
    worker.will_call("write_file", path="never.txt", content="no")
    chat.send("Write it.")
    calls(chat).get_by_role("button", name="Deny").click()
    expect(chat.answers).to_contain_text(["That was it."])
    chat.wait_until_done()
    expect(calls(chat)).to_contain_text("not applied")
    assert not (worker.folder / "never.txt").exists()


def test_all_writes_of_a_tool_are_allowed_in_a_chat(chat: ChatPage, worker: Worker) -> None:
    worker.will_call("write_file", path="one.txt", content="1")
    chat.send("Write one.")
    calls(chat).get_by_role("button", name="Always allow in this chat").click()
    expect(chat.answers).to_contain_text(["That was it."])
    chat.wait_until_done()
    worker.will_call("write_file", path="two.txt", content="2")
    chat.ask("Write two.")
    assert (worker.folder / "two.txt").read_text() == "2"
    with tools_of(chat) as panel:
        row = panel.locator(".tool-row").filter(has_text="Write file")
        expect(row.get_by_role("checkbox")).not_to_be_checked()


def test_a_command_is_watched_and_stopped(chat: ChatPage, worker: Worker) -> None:
    worker.will_call("exec_shell_command", command="echo it begins; sleep 1000", timeout=60)
    chat.send("Wait for it.")
    call = calls(chat)
    call.get_by_role("button", name="Allow", exact=True).click()
    expect(call.get_by_label("Output so far")).to_contain_text("it begins")
    assert commands(worker) != []
    call.get_by_role("button", name=re.compile("^Stop")).click()
    expect(chat.answers).to_contain_text(["That was it."])
    expect(call).to_contain_text("stopped")
    assert commands(worker) == []


def commands(worker: Worker) -> list[str]:
    """The commands that run in the folder of a server's tools."""
    found = []
    for pid in all_processes():
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cwd").readlink() == worker.folder:
                found.append(read(pid, "cmdline"))
    return found


def test_a_page_that_is_loaded_again_goes_on(chat: ChatPage, worker: Worker) -> None:
    worker.will_call("write_file", path="again.txt", content="still there")
    chat.send("Write it.")
    expect(calls(chat)).to_contain_text("waits for your approval")
    chat.page.reload()
    expect(calls(chat)).to_contain_text("waits for your approval")
    expect(chat.page).to_have_title(re.compile(r"^\(1\) Write it"))
    calls(chat).get_by_role("button", name="Allow", exact=True).click()
    expect(chat.answers).to_contain_text(["That was it."])
    chat.wait_until_done()
    assert (worker.folder / "again.txt").read_text() == "still there"
    chat.page.reload()
    expect(calls(chat)).to_have_count(1)
    expect(chat.answers).to_contain_text([worker.words])


def test_a_call_is_allowed_in_another_tab(chat: ChatPage, worker: Worker) -> None:
    worker.will_call("write_file", path="tab.txt", content="from the other one")
    chat.send("Write it.")
    expect(calls(chat)).to_contain_text("waits for your approval")
    other = ChatPage(chat.page.context.new_page())
    other.page.goto(chat.page.url)
    calls(other).get_by_role("button", name="Allow", exact=True).click()
    for each in (chat, other):
        expect(each.answers).to_contain_text(["That was it."])
        each.wait_until_done()
    assert (worker.folder / "tab.txt").read_text() == "from the other one"


def test_an_answer_that_is_stopped_ends_its_calls(chat: ChatPage, worker: Worker) -> None:
    worker.will_call("exec_shell_command", command="sleep 1000", timeout=60)
    chat.send("Wait for it.")
    call = calls(chat)
    call.get_by_role("button", name="Allow", exact=True).click()
    expect(call).to_contain_text("runs")
    chat.stop.click()
    chat.wait_until_done()
    expect(call).to_contain_text("stopped")
    expect(call.get_by_role("button", name=re.compile("^Stop"))).to_have_count(0)
    for _ in range(100):
        if not commands(worker):
            break
        chat.page.wait_for_timeout(20)
    assert commands(worker) == []


def test_what_is_hostile_in_a_call_is_text(chat: ChatPage, worker: Worker) -> None:
    """In arguments, changes, output and results."""
    some = ("script", "handler", "style", "form", "mutation")
    evil = "\n".join(HOSTILE[name] for name in some) + "\x1b[8mhidden\x1b[0m \u202egnp.exe\n"
    (worker.folder / "evil.html").write_text(evil)
    worker.will_call("read_file", path="evil.html")
    chat.ask("Read it.")
    worker.will_call("write_file", path="evil.txt", content=evil)
    chat.send("Write it.")
    expect(calls(chat).last).to_contain_text("\u27e8U+202E\u27e9gnp.exe")
    calls(chat).last.get_by_role("button", name="Allow", exact=True).click()
    expect(chat.answers.last).to_contain_text("That was it.")
    worker.will_call("exec_shell_command", command="cat evil.html; sleep 1000 #" + evil)
    chat.send("Show it.")
    calls(chat).last.get_by_role("button", name="Allow", exact=True).click()
    expect(calls(chat).last.get_by_label("Output so far")).to_contain_text("hidden")
    calls(chat).last.get_by_role("button", name=re.compile("^Stop")).click()
    expect(chat.answers.last).to_contain_text("That was it.")
    for call in calls(chat).all():
        call.locator(".fold").first.click()
    expect(chat.page.locator(".call .code")).to_have_count(3)
    for answer in chat.answers.all():
        assert_harmless(answer)


# -- what it looks like


@pytest.mark.parametrize("look", LOOKS)
def test_an_answer_with_calls_looks_good(
    visitor: Visitor, tools_server: tuple[str, Worker], look: str, tmp_path: Path
) -> None:
    """An answer with calls, the list of tools over it, and a call that waits."""
    url, worker = tools_server
    page = visitor.visit(url, device_scale_factor=2, **LOOKS[look])
    chat = ChatPage(page)
    chat.import_from(showcase.write_work(tmp_path / "chats.json"), "1 chat was added.")
    page.reload()
    if look == "phone":
        chat.button("Show the chats").click()
    chat.open(showcase.WORK_TITLE)
    expect(calls(chat)).to_have_count(4)
    for name in ("Edit file", "Shell"):
        calls(chat).filter(has_text=name).first.get_by_role("button").first.click()
    assert not scrolls_sideways(page)
    chat.questions.first.scroll_into_view_if_needed()
    if look == "light":
        shoot(page, "tools-light", tmp_path)
    with tools_of(chat) as panel:
        panel.get_by_role("switch", name="Write file").check()
        box, width = panel.bounding_box(), LOOKS[look]["viewport"]["width"]
        assert box is not None and 0 <= box["x"] <= width - box["width"]
        assert violations(page) == []
    (worker.folder / "notes.md").write_text(showcase.NOTES)
    worker.words = "I will add a line to the notes."
    worker.will_call("write_file", path="notes.md", content=showcase.MORE_NOTES)
    chat.send("Then note it for the next release.")
    expect(calls(chat).last).to_contain_text("waits for your approval")
    page.evaluate(_STILL)
    assert not scrolls_sideways(page)
    assert violations(page) == []
    if look != "light":
        shoot(page, f"asked-{look}", tmp_path)
    chat.stop.click()
    chat.wait_until_done()


# -- all of it together


@asynccontextmanager
async def serving_bundled() -> AsyncIterator[str]:
    """Serve the model that comes with trioserve, without chance, and an MCP server."""
    entry = {"command": sys.executable, "args": [str(WEATHER)]}
    servers = json.dumps({"mcpServers": {"weather": entry}})
    app = create_app(Config(sampling=SamplingParams(temperature=0), mcp_servers_json=servers))
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        yield url


def test_the_bundled_model_asks_an_mcp_server(
    visitor: Visitor, loop: TrioThread, tmp_path: Path
) -> None:
    with loop.open(serving_bundled()) as url:
        page = visitor.visit(url, **LOOKS["light"])
        chat = ChatPage(page)
        _turn_on(page, chat, "weather")
        with page.expect_request("**/chat/completions") as request:
            answer = chat.ask("What is the weather in Paris?")
        expect(answer).to_contain_text("The temperature is 21 and the condition is sunny.")
        expect(calls(chat)).to_contain_text("Paris")
        added = _added(url, request.value.headers["x-conversation-id"])
        with page.expect_request("**/chat/completions") as request:
            chat.ask("Thanks!")
        # So that the prompt is found in the cache as far as the template lets it be.
        question, *told, last = request.value.post_data_json["messages"]
        assert (question["role"], told, last["role"]) == ("user", added, "user")
        page.close()


def _turn_on(page: Page, chat: ChatPage, server: str) -> None:
    """Turn on the tools of an MCP server. Opening the list reads it again."""
    with tools_of(chat) as panel:
        panel.get_by_role("region", name=server).get_by_role("switch").check()


def _added(url: str, conversation: str) -> list[Any]:
    """The messages that an answer has added to its chat, as the server tells of them."""
    stream = httpx.get(f"{url}/v1/stream", params={"conv_id": conversation, "from": 0}).text
    chunks = re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)
    events = [json.loads(chunk).get("trioserve_event", {}) for chunk in chunks]
    (end,) = [event for event in events if event.get("type") == "end"]
    return list(end["messages"])
