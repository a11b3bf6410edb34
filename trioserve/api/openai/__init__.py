"""The routes of OpenAI's APIs: chats, completions, embeddings and, in `responses`, Responses."""

from __future__ import annotations

from trioserve.api.base.vendors import Vendor
from trioserve.api.openai import audio, chat, embeddings, runs

VENDOR = Vendor(
    name="openai",
    routes=(chat.routes, audio.routes, runs.routes, embeddings.routes),
)
