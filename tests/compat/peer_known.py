"""Known results of llama-server's tests: those for later, those that need a model, differences.

`docs/api.md` names the differences, with the same reasons.
"""

from __future__ import annotations

import re

import attrs

#: Patterns of tests for what trioserve does not have yet, and what that is.
LATER: tuple[tuple[str, str], ...] = (
    (r"test_stream\.py", "streams that a client can resume"),
    (r"test_router\.py.*(remote_preset|download_model|delete_model)", "a hub on the internet"),
    (r"test_mcp_proxy$", "a server on the internet"),
    (r"test_speculative\.py", "speculative decoding"),
)

#: Patterns of tests in which `match_regex` looks at what a grammar or a template forces.
STRICT: tuple[str, ...] = (r"response_format", r"json_schema", r"with_grammar", r"apply_chat")

#: The columns of `Known`.
NEEDS_MODEL, ACCEPTED = "needs a model", "accepted"


@attrs.frozen
class Known:
    """A failure that is expected: of these tests, and with such a message."""

    test: str
    message: str
    why: str
    column: str = ACCEPTED

    def covers(self, test: str, message: str) -> bool:
        """True if this failure is the known one."""
        return bool(re.search(self.test, test) and re.search(self.message, message))


KNOWN: tuple[Known, ...] = (
    Known(
        r"test_(chat_)?completion\.py|test_slot_save|test_ctx_shift|test_(embedding|rerank).*usage",
        r"^assert \d+ == (\d+|\(\d+ \* \d+\))\Z",  # no "where 400 = ….status_code"
        "it counts the tokens that its own vocabulary makes of a text",
        NEEDS_MODEL,
    ),
    Known(
        r"test_completion_prompt_cache|test_embedding_pooling_none|test_slot_save_restore_image_pay",
        r"prompt_n|len\(",
        "it counts the tokens that its own vocabulary makes of a text",
        NEEDS_MODEL,
    ),
    Known(
        r"test_slot_save_restore_with_image$",
        r"^assert \d+ < 16",
        "it counts the tokens that its own vocabulary makes of a text",
        NEEDS_MODEL,
    ),
    Known(
        r"test_rerank(_tei_format)?$",
        r"^assert \d == \d",
        "it knows which document answers the question",
        NEEDS_MODEL,
    ),
    Known(
        r"test_n_probs_post_sampling",
        r"^AssertionError: assert \d+ == 10",
        "the test counts the candidates that its samplers leave",
        NEEDS_MODEL,
    ),
    # -- what differs, and stays so
    Known(
        r"test_server_model_aliases_and_tags",
        r"== 'code'",
        "answers name a model by its first name, not the first in alphabetical order",
    ),
    Known(
        r"test_completion_with_response_format.*-3000",
        r"match_regex",
        "a schema with items and no type allows other values than arrays, as in JSON Schema",
    ),
    Known(
        r"test_responses_stream_with_llama_telemetry",
        r"None is not None",
        "a response that max_output_tokens cuts short is incomplete, as in OpenAI's API",
    ),
    Known(
        r"test_anthropic_empty_messages",
        r"400 == 200",
        "a chat without messages is a 400, as in Anthropic's API",
    ),
    Known(
        r"test_anthropic_(vision_format_accepted|tool_result_with_image)",
        r"400 == 500",
        "an image for a model that sees none is a 400, not a 500",
    ),
    Known(
        r"test_cors_options.*(Allow-Origin|Credentials)",
        r"'\*' == |Allow-Credentials",
        "with --cors-origins '*', Access-Control-Allow-Origin is '*', without credentials",
    ),
    Known(
        r"test_cors_options.*Allow-Headers",
        r"== '\*'",
        "allowed headers are named, because * does not stand for Authorization",
    ),
    Known(
        r"test_access_static_assets_without_api_key",
        r"/manifest\.webmanifest",
        "the chat page has no manifest, and its files have other names",
    ),
    Known(
        r"test_clear_and_restore",
        r"__TEST_TAG_",
        "log lines have other words",
    ),
    Known(
        r"test_vision_embeddings_oai_content",
        r"^assert \[.*\] == \[",
        "rounding depends on the rest of the batch",
    ),
)
