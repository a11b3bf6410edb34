"""The routes of OpenAI's Responses API: its items, tools and events."""

from __future__ import annotations

from trioserve.api.base.vendors import PromptFields, Vendor
from trioserve.api.openai.responses import events, routes

_PROMPT = PromptFields(head=("instructions", "tools"), turns=("input",))

VENDOR = Vendor(
    paths=("/v1/responses", "/responses"),
    routes=(routes.blueprint,),
    errors=events.SHAPE,
    prompts={"/v1/responses": _PROMPT, "/responses": _PROMPT},
)
