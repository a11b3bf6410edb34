"""Outputs in llama-server's form, and what all answers say of the model that made them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from trioserve._version import __version__
from trioserve.api.base.answers import Answer
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.scores import TokenProbs
from trioserve.api.base.settings import generation_settings
from trioserve.api.base.timings import Timings, timings_of
from trioserve.server.server import Server
from trioserve.types import Finished, GenerationParams, Prompt, TokenId

#: The build that made a response, for `system_fingerprint` and `build_info`. Clients of
#: llama-server expect a "b" at its beginning.
FINGERPRINT = f"b{__version__}-trioserve"

#: The field of other answers that has an output, too.
VERBOSE = "__verbose"


def new_id(prefix: str) -> str:
    """Make the id of a response."""
    return f"{prefix}-{secrets.token_hex(16)}"


def name_of(server: Server, request: GenerationRequest, params: GenerationParams) -> str:
    """The name that an answer gives for its model: that of its adapter, if the request names one.

    The server is awake.
    """
    if params.lora and not request.lora:
        return server.adapters.scales.names[params.lora[0][0]]
    return server.model.info.name


class Output(Answer):
    """An output in llama-server's form.

    The `response_fields` of a request choose fields, also by paths in others.
    """

    is_open = True
    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: Sequence[int] | UnsetType = UNSET
    id_slot: int | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    completion_probabilities: Sequence[TokenProbs] | UnsetType = UNSET


class OutputWriter:
    """Writes outputs that have ended as llama-server's own routes do; on others, as ``__verbose``.

    That field is there where a request asks for it, or the log level is debug.
    """

    def __init__(
        self, server: Server, request: GenerationRequest, params: GenerationParams
    ) -> None:
        self.model = name_of(server, request, params)
        #: The bytes of each token.
        self.pieces = server.model.vocab.pieces
        self._server, self._request, self._params = server, request, params
        wanted = request.verbose
        self._is_verbose = server.config.log_level == "debug" if wanted is None else wanted

    def whole(
        self,
        index: int,
        prompt: Prompt,
        finished: Finished,
        *,
        text: str = "",
        tokens: Sequence[TokenId] = (),
    ) -> Output:
        """Write an output. `text` and `tokens` are empty at the end of a stream."""
        server, n_predicted = self._server, finished.timings.predicted_n
        return Output(
            index=index,
            content=text,
            tokens=tokens,
            id_slot=finished.slot_id,
            stop=True,
            model=self.model,
            tokens_predicted=n_predicted,
            tokens_evaluated=len(prompt),
            generation_settings=generation_settings(
                self._params,
                self._request,
                reasoning_format=server.config.reasoning_format,
                end_of_generation=server.model.vocab.end_of_generation,
                draft_types=server.config.draft_types,
            ),
            prompt=server.text(prompt),
            has_new_line="\n" in text,
            truncated=finished.truncated,
            stop_type=finished.reason.value,
            stopping_word=finished.stopping_word,
            # The last token was sampled, and not decoded.
            tokens_cached=len(prompt) + max(n_predicted - 1, 0),
            timings=timings_of(finished.timings),
        )

    def verbose(
        self, index: int, prompt: Prompt, finished: Finished, tokens: Sequence[TokenId] = ()
    ) -> dict[str, Any]:
        """Write the field, or nothing; of a whole answer with its tokens."""
        if not self._is_verbose:
            return {}
        text = self._server.text(tokens) if tokens else ""
        return {VERBOSE: self.whole(index, prompt, finished, text=text, tokens=tokens)}
