"""The routes of OpenAI's APIs: chats, embeddings, speech and others; `responses` has Responses."""

from __future__ import annotations

from trioserve.api.base.vendors import Vendor
from trioserve.api.openai import audio, chat, embeddings, runs, speech

VENDOR = Vendor(
    name="openai",
    routes=(chat.routes, audio.routes, speech.routes, runs.routes, embeddings.routes),
)
