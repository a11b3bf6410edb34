"""`ChatOptions`: the options of chats: what their template is told, and how long a model may think.

They are a part of `trioserve.config.Config`. The names are llama-server's.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from trioserve.config.option import option
from trioserve.errors import ConfigError


@attrs.frozen(kw_only=True, slots=False)  # `Config` has several such bases
class ChatOptions:
    """Options of chats."""

    chat_template_kwargs: str = option(
        "",
        "--chat-template-kwargs",
        group="Chat",
        env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        help='variables for the template, as a JSON object, such as {"k": "v"}',
    )
    skip_chat_parsing: bool = option(
        False,
        "--skip-chat-parsing",
        group="Chat",
        env="LLAMA_ARG_SKIP_CHAT_PARSING",
        help="leave reasoning and tool calls in the content, as the model wrote them",
    )
    reasoning: str = option(
        "auto",
        "-rea",
        "--reasoning",
        group="Chat",
        env="LLAMA_ARG_REASONING",
        choices=("on", "off", "auto"),
        help="whether the template is told to have the model think; auto: if it can",
    )
    reasoning_format: str = option(
        "auto",
        "--reasoning-format",
        group="Chat",
        env="LLAMA_ARG_THINK",
        choices=("none", "auto", "deepseek", "deepseek-legacy"),
        help="where reasoning goes: none: it stays in the content; auto and deepseek: into "
        "reasoning_content; deepseek-legacy: into both",
    )
    reasoning_effort: str = option(
        "default",
        "--reasoning-effort",
        group="Chat",
        env="LLAMA_ARG_REASONING_EFFORT",
        help="level that the template is told, such as low or high; default: none",
    )
    reasoning_budget: int = option(
        -1,
        "--reasoning-budget",
        group="Chat",
        env="LLAMA_ARG_THINK_BUDGET",
        least=-1,
        most=2**31 - 1,
        help="most tokens of reasoning; 0: it ends at once; -1: no limit",
    )
    reasoning_budget_message: str = option(
        "",
        "--reasoning-budget-message",
        group="Chat",
        env="LLAMA_ARG_THINK_BUDGET_MESSAGE",
        help="last words of reasoning whose budget is used up",
    )
    reasoning_preserve: bool = option(
        True,
        "--reasoning-preserve",
        group="Chat",
        env="LLAMA_ARG_REASONING_PRESERVE",
        help="have the template show the reasoning of all messages, if it can",
    )
    prefill_assistant: bool = option(
        True,
        "--prefill-assistant",
        group="Chat",
        env="LLAMA_ARG_PREFILL_ASSISTANT",
        help="go on with a last message that is the assistant's, rather than answer it",
    )

    def __attrs_post_init__(self) -> None:
        """Refuse variables that are no JSON object."""
        self.template_variables  # noqa: B018

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the template that the options set; a request may set others.

        Raises:
            ConfigError: `chat_template_kwargs` is not a JSON object.
        """
        try:
            given = json.loads(self.chat_template_kwargs or "{}")
        except ValueError as error:
            raise ConfigError(f"chat_template_kwargs is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError("chat_template_kwargs must be a JSON object")
        variables: dict[str, Any] = {}
        if self.reasoning != "auto":
            variables["enable_thinking"] = self.reasoning == "on"
        if self.reasoning_effort != "default":
            variables["reasoning_effort"] = self.reasoning_effort
        variables["preserve_reasoning"] = self.reasoning_preserve
        return {**variables, **given}
