"""`HubReference`: how a person names a model on the hub."""

from __future__ import annotations

import re
from typing import Self

import attrs

from trioserve.errors import InvalidRequestError

_NAME = r"\w+(?:[.-]\w+)*"
_REPO = re.compile(rf"{_NAME}/{_NAME}", re.ASCII)
_REFERENCE = re.compile(
    rf"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?({_REPO.pattern})(?::([\w.-]+))?", re.ASCII
)
_MAX_LENGTH = 256


@attrs.frozen
class HubReference:
    """A model in a repository of the hub.

    Without `quant` and `file`, the choice is llama-server's: Q4_K_M, else Q8_0, else the first.
    """

    repo: str  # "user/name"
    quant: str | None = None  # "Q4_K_M", in any case
    file: str | None = None  # a path in the repository; wins over `quant`

    @classmethod
    def parse(cls, text: str, *, file: str | None = None) -> Self:
        """Read ``user/repo`` or ``user/repo:quant``, with or without ``hf.co/`` in front.

        Raises:
            InvalidRequestError: it is not that.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None or len(match[1]) > _MAX_LENGTH:
            raise InvalidRequestError(
                f"{text[:_MAX_LENGTH]!r} is not a model on the hub: it must be user/repo or "
                "user/repo:quant, such as ggml-org/gemma-3-4b-it-GGUF:Q4_K_M.",
                param="model",
            )
        quant = None if match[2] in (None, "latest") else match[2]  # Ollama adds ":latest"
        return cls(match[1], quant, file)

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.repo}/{self.file}"
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def is_repo(text: str) -> bool:
    """Whether this is the name of a repository: ``user/repo``."""
    return len(text) <= _MAX_LENGTH and _REPO.fullmatch(text) is not None
