"""Settings of the page, and their effect on requests and answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.fake_fleet import routed
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from tests.ui.test_looks import violations

pytestmark = pytest.mark.system


def body_sent(chat: ChatPage, text: str) -> dict[str, Any]:
    with chat.page.expect_request("**/v1/chat/completions") as asked:
        chat.ask(text)
    return json.loads(asked.value.post_data or "")


def test_answers_follow_a_schema_and_show_their_tokens(chat: ChatPage, script: PacedScript) -> None:
    script.answer = '{"n": 7}'
    with chat.settings("This chat") as panel:
        schema = panel.get_by_label("Answers follow a JSON Schema")
        schema.fill("[1")
        expect(panel.get_by_text("This is no object in JSON.")).to_be_visible()
        schema.fill('{"type": "object"}')
        schema.blur()
        panel.get_by_text("Other samplers").click()
        panel.get_by_label("Alternatives of tokens", exact=True).fill("2")
    body = body_sent(chat, "A number?")
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    assert not body.keys() & {"json_schema"}
    fold = chat.answers.first.get_by_role("button", name="Probabilities of the tokens")
    fold.click()
    tokens = chat.answers.first.get_by_role("group", name="Tokens; the arrow keys choose one")
    expect(tokens).to_have_text('{"n": 7}')
    tokens.press("ArrowRight")
    expect(tokens.locator(".chosen")).to_have_text('"')
    assert violations(chat.page) == []


def test_thinking_is_switched_at_the_field(chat: ChatPage) -> None:
    chat.page.route("**/props", lambda route: route.fulfill(json=with_thinking(route)))
    chat.page.reload()
    button = chat.button("Think before answering")
    expect(button).to_have_attribute("aria-pressed", "true")
    assert "reasoning_effort" not in body_sent(chat, "One?")
    button.click()
    assert body_sent(chat, "Two?")["reasoning_effort"] == "none"
    button.click()
    assert "reasoning_effort" not in body_sent(chat, "Three?")


def with_thinking(route: Any) -> dict[str, Any]:
    props = route.fetch().json()
    caps = {**props["chat_template_caps"], "supports_enable_thinking": True}
    return {**props, "chat_template_caps": caps}


def test_a_chat_is_saved_as_markdown(chat: ChatPage, script: PacedScript, tmp_path: Path) -> None:
    script.answer = "It is **so**."
    chat.ask("Is it so?")
    with chat.page.expect_download() as download:
        chat.menu_of("Is it so?", "Export as Markdown")
    assert re.fullmatch(r"is-it-so-[\d-]+\.md", download.value.suggested_filename)
    download.value.save_as(tmp_path / "chat.md")
    text = (tmp_path / "chat.md").read_text()
    assert re.fullmatch(
        r"# Is it so\?\n\n## You\n\nIs it so\?\n\n## Answer( \(\w+\))?\n\nIt is \*\*so\*\*\.\n",
        text,
    )


def test_a_warning_can_be_closed(chat: ChatPage) -> None:
    chat.page.route("**/v1/models", lambda route: route.fulfill(json=as_base_model(route)))
    chat.page.reload()
    warning = chat.page.get_by_text("This model has no chat template.")
    expect(warning).to_be_visible()
    chat.button("Close the notice").click()
    expect(warning).to_be_hidden()
    expect(chat.composer).to_be_focused()


def as_base_model(route: Any) -> dict[str, Any]:
    models = route.fetch().json()
    models["data"][0]["has_chat_template"] = False
    return models


def test_what_is_said_in_a_tab_is_shown_in_the_other(chat: ChatPage) -> None:
    chat.ask("One?")
    other = ChatPage(chat.page.context.new_page())
    other.page.goto(chat.page.url)
    expect(other.answers).to_have_count(1)
    other.ask("Two?")
    expect(chat.answers).to_have_count(2)
    chat.ask("Three?")
    expect(other.questions).to_have_text([re.compile(text) for text in ("One", "Two", "Three")])


def test_two_models_answer_beside_each_other(
    loop: TrioThread, script: PacedScript, visitor: Visitor
) -> None:
    with loop.open(routed({name: script.backend(name) for name in ("one", "two")})) as router:
        chat = ChatPage(visitor.visit(router.url))
        expect(chat.button("Model:")).to_be_visible()
        script.answer = "From the first."
        chat.ask("Who?")
        script.answer = "From the second."
        chat.button("Answer with another model").click()
        with chat.page.expect_request("**/v1/chat/completions") as asked:
            chat.page.get_by_role("menuitem", name="two").click()
        assert json.loads(asked.value.post_data or "")["model"] == "two"
        expect(chat.answers.first).to_contain_text("From the second.")
        chat.wait_until_done()
        compare = chat.button("Compare with another version")
        compare.click()
        expect(chat.answers.first).to_contain_text("From the first.")
        expect(chat.answers.first.get_by_role("heading")).to_have_text(["two", "one"])
        assert violations(chat.page) == []


def test_a_model_that_only_embeds_compares_texts(chat: ChatPage) -> None:
    def props(route: Any) -> None:
        route.fulfill(json={**route.fetch().json(), "endpoint_chat": False})

    vectors = {"one": [1, 0], "uno": [3, 4], "two": [0, 2]}

    def embed(route: Any) -> None:
        texts = route.request.post_data_json["input"]
        route.fulfill(json={"data": [{"embedding": vectors[text]} for text in texts]})

    chat.page.route("**/props", props)
    chat.page.route("**/v1/embeddings", embed)
    chat.page.reload()
    chat.page.get_by_label("Texts").fill("one\n\nuno\ntwo")
    expect(chat.composer).to_have_count(0)
    chat.button("Compare").click()
    cells = chat.page.get_by_role("region", name="How alike the texts are").get_by_role("cell")
    expect(cells).to_have_text(
        ["1.00", "0.60", "0.00", "0.60", "1.00", "0.80", "0.00", "0.80", "1.00"]
    )
    assert violations(chat.page) == []


def test_a_question_gets_the_nearest_parts_of_a_long_document(chat: ChatPage) -> None:
    text = "".join(f"Line {number} is about nothing.\n" for number in range(400))
    text = text.replace("Line 250 is about nothing", "Line 250 says that the key is 4711")

    def props(route: Any) -> None:
        told = {**route.fetch().json(), "endpoint_embeddings": True}
        told["default_generation_settings"]["n_ctx"] = 1024
        route.fulfill(json=told)

    def models(route: Any) -> None:
        told = route.fetch().json()
        told["data"][0]["meta"]["n_ctx"] = 1024
        route.fulfill(json=told)

    def embed(route: Any) -> None:
        texts = route.request.post_data_json["input"]
        vectors = [[1, 0] if "key" in one else [0, 1] for one in texts]
        route.fulfill(json={"data": [{"embedding": one} for one in vectors]})

    for path, answer in {"props": props, "v1/models": models, "v1/embeddings": embed}.items():
        chat.page.route(f"**/{path}", answer)
    chat.page.reload()
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("button", name=re.compile("^Attach")).click()
    chooser.value.set_files(
        [{"name": "long.txt", "mimeType": "text/plain", "buffer": text.encode()}]
    )
    (said,) = body_sent(chat, "What is the key?")["messages"]
    assert "the key is 4711" in said["content"] and len(said["content"]) < 1500
    assert re.search(r"File: long.txt, characters \d+ to \d+ of \d+\n", said["content"])
    fold = chat.questions.first.get_by_role("button", name="1 part of the documents was found")
    fold.click()
    expect(chat.questions.first.get_by_role("blockquote")).to_contain_text("4711")
    body = body_sent(chat, "And nothing?")
    assert len(body["messages"]) == 3 and body["messages"][0] == said
    assert "File: long.txt" in body["messages"][2]["content"]
    assert violations(chat.page) == []
