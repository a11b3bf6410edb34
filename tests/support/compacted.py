"""A model that sums up conversations, for tests of compaction."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx

from tests.support.clients import client_of
from tests.support.scripts import answering
from trioserve.chat.compaction import TASK


class Model:
    """Answers, and sums up what looks like a fact; notes its prompts."""

    def __init__(self, answer: str = "Well.", summary: str | None = None) -> None:
        self.prompts: list[str] = []
        self.answer, self.summary = answer, summary

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if TASK not in prompt:
            return self.answer
        if self.summary is not None:
            return self.summary
        return "Summary: " + ", ".join(dict.fromkeys(re.findall(r"fact-\w+", prompt)))


def serve(model: Model, **settings: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """Serve it with a context of 8192 letters."""
    return client_of(answering(model, **{"n_ctx": 8192, **settings}))
