"""The routes of OpenAI's APIs: chats, completions, embeddings and, in `responses`, Responses."""

from __future__ import annotations

from trioserve.api.base.vendors import PromptFields, Vendor
from trioserve.api.openai import audio, chat, embeddings, runs

_CHAT = PromptFields(head=("tools", "functions"), turns=("messages",))

VENDOR = Vendor(
    routes=(chat.blueprint, audio.blueprint, runs.blueprint, embeddings.blueprint),
    prompts={
        "/v1/chat/completions": _CHAT,
        "/chat/completions": _CHAT,
        "/v1/completions": PromptFields(turns=("prompt",)),
    },
    answer_rules=(
        "/v1/chat/completions/<id>/approve",
        "/v1/chat/completions/<id>/stop",
        "/v1/responses/<id>/approve",
        "/v1/responses/<id>/stop",
    ),
)
