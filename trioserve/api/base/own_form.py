"""How llama-server writes an output on its own routes; on others, as ``__verbose``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trioserve.api.base import writers
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.server import Server
from trioserve.types import Finished, GenerationParams, Prompt, TokenId


def own_form(
    server: Server,
    request: GenerationRequest,
    params: GenerationParams,
    prompt: Prompt,
    finished: Finished,
    *,
    text: str,
    tokens: Sequence[TokenId],
    index: int,
) -> dict[str, Any]:
    """Write an output that has ended. `text` and `tokens` are empty at the end of a stream."""
    n_predicted = finished.timings.predicted_n
    return {
        "index": index,
        "content": text,
        "tokens": tokens,
        "id_slot": finished.slot_id,
        "stop": True,
        "model": server.model.info.name,
        "tokens_predicted": n_predicted,
        "tokens_evaluated": len(prompt),
        "generation_settings": writers.generation_settings(
            params,
            request,
            reasoning_format=server.config.reasoning_format,
            end_of_generation=server.model.vocab.end_of_generation,
            draft_types=server.config.draft_types,
        ),
        "prompt": server.text_of(prompt),
        "has_new_line": "\n" in text,
        "truncated": finished.truncated,
        "stop_type": finished.reason.value,
        "stopping_word": finished.stopping_word,
        # The last token was sampled, and not decoded.
        "tokens_cached": len(prompt) + max(n_predicted - 1, 0),
        "timings": writers.timings(finished.timings),
    }


class Verbose:
    """Writes ``__verbose``, where a request asks for it or the log level is debug.

    Call it with the number of an output, its prompt and how it ended, and for a whole answer with
    its tokens.
    """

    def __init__(
        self, server: Server, request: GenerationRequest, params: GenerationParams
    ) -> None:
        self._server, self._request, self._params = server, request, params
        wanted = request.verbose
        self.is_on = server.config.log_level == "debug" if wanted is None else wanted

    def __call__(
        self,
        index: int,
        prompt: Prompt,
        finished: Finished,
        tokens: Sequence[TokenId] = (),
    ) -> dict[str, Any]:
        """Write the field, or nothing."""
        if not self.is_on:
            return {}
        text = self._server.detokenize(tokens) if tokens else ""
        written = own_form(
            self._server,
            self._request,
            self._params,
            prompt,
            finished,
            text=text,
            tokens=tokens,
            index=index,
        )
        return {"__verbose": written}
