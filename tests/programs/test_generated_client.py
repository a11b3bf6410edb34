"""openapi-python-client: clients that are generated from the documents of the APIs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.running import bin_of, environment_of, run, served
from tests.programs.table import Works
from trioserve.api.openapi import APIS

pytestmark = pytest.mark.system

#: A program with the client: chats, continues a text, and gets an error that names the field.
_CHAT = """
import sys
from made.openai.client import Client
from made.openai.api.default import (
    get_v1_models,
    post_v1_chat_completions as chats,
    post_v1_completions as completions,
)
from made.openai.models.chat_completion import ChatCompletion
from made.openai.models.chat_request import ChatRequest
from made.openai.models.completion import Completion
from made.openai.models.completion_request import CompletionRequest
from made.openai.models.error import Error

client = Client(base_url=sys.argv[1])
[model] = get_v1_models.sync(client=client).data
messages = [{"role": "user", "content": "Hello"}]
body = ChatRequest.from_dict({"model": model.id, "messages": messages})
answer = chats.sync(client=client, body=body)
assert isinstance(answer, ChatCompletion), answer
text = answer.choices[0].message.content
assert answer.usage.completion_tokens == len(text) + 1, answer.usage
body = CompletionRequest.from_dict({"prompt": "Hello"})
answer = completions.sync(client=client, body=body)
assert isinstance(answer, Completion), answer
assert answer.choices[0].text == text
answer = completions.sync(client=client, body=CompletionRequest.from_dict({"prompt": "", "n": 0}))
assert isinstance(answer, Error), answer
assert answer.error.param == "n", answer
print(text)
"""


async def test_a_generated_client_chats(tmp_path: Path, works: Works) -> None:
    program = bin_of("openapi-python-client")
    environ = environment_of("openapi-python-client", home=tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").touch()
    async with served(lambda prompt: "It is noon.") as server:
        for api in APIS:
            ended = await run(
                [str(program / "openapi-python-client"), "generate", "--meta", "none",
                 "--url", f"{server.url}/openapi/{api}.json", "--output-path", f"made/{api}"],
                folder=tmp_path,
                environ=environ,
            )  # fmt: skip
            assert ended.code == 0, ended.output
            assert "WARNING" not in ended.output and "Unable to" not in ended.output, ended.output
        (tmp_path / "chat.py").write_text(_CHAT, encoding="utf-8")
        ended = await run(
            [str(program / "python"), "chat.py", server.url], folder=tmp_path, environ=environ
        )
    assert ended.code == 0, ended.output
    assert ended.output.strip() == "It is noon."
    works("openapi-python-client", "generates a client of each API; a generated client chats")
