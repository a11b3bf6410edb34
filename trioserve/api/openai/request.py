"""What ``POST /v1/completions`` may hold. Chats: `trioserve.api.base.chat_request`."""

from __future__ import annotations

import attrs

from trioserve.api.base import readers
from trioserve.api.base.fields import field
from trioserve.api.base.generation_request import UNSUPPORTED, TextRequest
from trioserve.api.base.readers import GivenPrompt
from trioserve.errors import InvalidRequestError


@attrs.frozen(kw_only=True, slots=False)
class CompletionRequest(TextRequest):
    """``POST /v1/completions``."""

    unsupported = UNSUPPORTED
    prompts: tuple[GivenPrompt, ...] = field("prompt", read=readers.prompts)
    suffix: str = ""
    echo: bool = False
    best_of: int | None = field(read=readers.copies, default=None)

    @property
    def n_copies(self) -> int:
        """How many times each prompt is continued; `best_of` are made to choose from."""
        return self.n if self.best_of is None else self.best_of

    @property
    def asked_probs(self) -> tuple[int, str | None]:
        """How many candidates to report for each token; a choice needs the token's own."""
        n, asked = super().asked_probs
        return n or int(self.n_copies > self.n), asked

    def __attrs_post_init__(self) -> None:
        if self.best_of is not None:
            _check_best_of(self, self.best_of)
        for other, given in (("suffix", self.suffix), ("logprobs", self.logprobs)):
            if self.echo and given:
                raise InvalidRequestError.at("echo", f"and '{other}' exclude each other.")


def _check_best_of(request: CompletionRequest, best_of: int) -> None:
    if best_of < request.n:
        raise InvalidRequestError.at("best_of", "must be at least 'n'.")
    if best_of > request.n and request.stream:
        raise InvalidRequestError.at("best_of", "cannot be streamed.")
    if best_of > request.n and request.scalars.get("post_sampling_probs"):
        raise InvalidRequestError.at(
            "best_of",
            "goes by the probabilities before sampling, and 'post_sampling_probs' asks for others.",
        )
