"""MCP servers that a person adds to the page."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations
from playwright.sync_api import Locator, expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving, serving_script
from tests.support.scripts import answering
from tests.support.trio_thread import TrioThread
from tests.ui.hostile import RUN
from tests.ui.test_hostile import assert_harmless

pytestmark = [
    pytest.mark.system,
    # The SDK's server leaves its streams to the garbage collector, which closes them.
    pytest.mark.filterwarnings("ignore:Async generator 'httpcore2:ResourceWarning"),
]

HOSTILE = f"<img src=x onerror='{RUN}'>"


def mcp_server() -> MCPServer:
    """A server with a tool that reads and one that writes, a prompt and a resource."""
    made = MCPServer("remote")

    @made.tool(annotations=ToolAnnotations(read_only_hint=True), title=f"Weather {HOSTILE}")
    def weather(city: str) -> str:
        return f"It rains in {city}. {HOSTILE}"

    @made.tool(description=HOSTILE)
    def erase(city: str) -> str:
        return f"{city} is gone."

    @made.prompt(title=f"Greet {HOSTILE}")
    def greet(who: str) -> str:
        return f"Say hello to {who}."

    @made.resource("note://one", title=f"Note {HOSTILE}")
    def note() -> str:
        return "Buy three eggs."

    return made


def say(prompt: str) -> str:
    """Call the tool that a question names; answer once there is a result."""
    last = prompt.rsplit("user\n", 1)[-1]
    if "tool_response" in last:
        return "The model has the result."
    for name in re.findall(r'"name": ?"((?:weather|erase)_\w+)"', prompt):
        if name.split("_")[0] in last:
            call = json.dumps({"name": name, "arguments": {"city": "Paris"}})
            return f"<tool_call>\n{call}\n</tool_call>"
    return f"You said: {last[:60]}"


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[str, str]]:
    backend = answering(say, n_ctx=262_144, n_ctx_seq=65_536, n_slots=4)
    hosts = ("127.0.0.1:*",)
    async with (
        serving(mcp_server().streamable_http_app()) as remote,
        serving_script(backend, ui_mcp_proxy=True, ui_mcp_proxy_hosts=hosts) as (url, _),
    ):
        yield url, f"{remote}/mcp"


@pytest.fixture
def chat(visitor: Visitor, loop: TrioThread) -> Iterator[ChatPage]:
    """A page that is connected to an MCP server, and a chat in which its tools are on."""
    visitor.expect("ERR_CONNECTION_REFUSED")  # the server ends before its pages
    with loop.open(_serving()) as (url, remote):
        chat = ChatPage(visitor.visit(url))
        with chat.settings("MCP servers") as panel:
            panel.get_by_label("Address").fill(remote)
            panel.get_by_label("Name").fill(f"Far {HOSTILE}")
            panel.get_by_role("button", name="Add").click()
            expect(panel.get_by_text("2 tools · 1 prompt · 1 resource")).to_be_visible()
            assert_harmless(panel.get_by_role("list"))
        chat.button(re.compile("^Tools")).click()
        panel = chat.page.get_by_role("dialog", name="Tools")
        panel.get_by_role("button", name="All", exact=True).click()
        assert_harmless(panel)
        chat.page.keyboard.press("Escape")
        yield chat


def approval(chat: ChatPage) -> Locator:
    return chat.page.get_by_role("group", name=re.compile("^Approval of"))


def test_a_tool_that_reads_is_called(chat: ChatPage) -> None:
    chat.send("What is the weather?")
    expect(chat.answers.last).to_contain_text("The model has the result.")
    result = chat.page.get_by_role("article", name="Result of a tool")
    result.get_by_role("button").first.click()
    expect(result).to_contain_text("It rains in Paris.")
    assert_harmless(chat.page.locator(".talk-column"))


def test_a_tool_that_writes_waits_for_approval(chat: ChatPage) -> None:
    chat.send("Please erase it.")
    expect(approval(chat)).to_be_visible()
    assert_harmless(approval(chat))
    approval(chat).get_by_role("button", name="Deny").click()
    expect(chat.answers.last).to_contain_text("The model has the result.")
    expect(chat.page.get_by_text("Not applied:")).to_be_visible()
    chat.send("Now erase it.")
    approval(chat).get_by_role("button", name="Always allow in this chat").click()
    expect(chat.answers.last).to_contain_text("The model has the result.")
    chat.wait_until_done()
    chat.send("And erase it again.")
    expect(chat.page.get_by_role("article", name="Result of a tool")).to_have_count(3)
    expect(approval(chat)).to_have_count(0)


def test_prompts_and_resources_go_into_a_message(chat: ChatPage) -> None:
    chat.button("Prompts and resources").click()
    panel = chat.page.get_by_role("dialog", name="Prompts and resources")
    assert_harmless(panel)
    panel.get_by_role("button", name="Greet").click()
    panel.get_by_label("who").fill("Ada")
    panel.get_by_role("button", name="Use").click()
    expect(chat.composer).to_have_value("Say hello to Ada.")
    chat.button("Prompts and resources").click()
    panel.get_by_role("button", name="Note").click()
    expect(chat.page.get_by_role("list", name="Attached files")).to_contain_text("Note")
    chat.button("Send").click()
    expect(chat.answers.last).to_contain_text("You said")
    expect(chat.questions.last).to_contain_text("Say hello to Ada.")


def test_without_the_proxy_the_page_says_what_it_needs(
    visitor: Visitor, server: tuple[str, object]
) -> None:
    chat = ChatPage(visitor.visit(server[0]))
    with chat.settings("MCP servers") as panel:
        expect(panel).to_contain_text("--ui-mcp-proxy")
        expect(panel.get_by_label("Address")).to_have_count(0)
