"""``options``: what Ollama's clients say of sampling and limits, and of how a model is loaded.

What is fixed when a model is loaded is a flag of the server, so a request cannot change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.api.base import readers
from trioserve.api.base.fields import field, integer, json_type
from trioserve.api.base.neutral import Neutral, only
from trioserve.errors import InvalidRequestError, UnsupportedFieldError

#: Options that requests cannot change: the flag that does it, if there is one, and which values
#: ask for nothing. They are Ollama's defaults.
FIXED: Mapping[str, tuple[str, Neutral]] = {
    "num_batch": ("--batch-size", only()),
    "num_gpu": ("--n-gpu-layers", only(-1)),
    "main_gpu": ("--main-gpu", only(0)),
    "num_thread": ("--threads", only(0)),
    "use_mmap": ("--load-mode", only(True)),
    "use_mlock": ("--load-mode", only(False)),
    "numa": ("--numa", only(False)),
    "f16_kv": ("--cache-type-k", only()),
    "embedding_only": ("--embeddings", only(False)),
    "low_vram": ("", only(False)),
    "logits_all": ("", only(False)),
    "vocab_only": ("", only(False)),
    "penalize_newline": ("", only(True)),
    "tfs_z": ("", only(1, 1.0)),
}


@json_type({"type": "integer", "description": "0 and less: no limit."})
def _num_predict(value: Any) -> int:
    n = integer(value)
    return -1 if n <= 0 else readers.max_tokens(n)


@attrs.frozen(kw_only=True)
class ContextOptions:
    """The option of requests that generate nothing."""

    n_ctx: int | None = field("num_ctx", read=readers.integer_in(1), default=None)

    def check(self, n_ctx: int) -> None:
        """Refuse to promise a longer context than there is. Raises InvalidRequestError."""
        if self.n_ctx is not None and self.n_ctx > n_ctx:
            raise InvalidRequestError(
                f"'options.num_ctx' is {self.n_ctx}, and a request has a context of {n_ctx} tokens "
                "here; the flag --ctx-size sets it.",
                param="options.num_ctx",
            )


@attrs.frozen(kw_only=True)
class Options(ContextOptions):
    """The options of requests that generate."""

    max_tokens: int | None = field("num_predict", read=_num_predict, default=None)
    n_keep: int | None = field("num_keep", read=readers.budget, default=None)
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    stop: tuple[str, ...] | None = field(read=readers.words, default=None)

    @property
    def params(self) -> dict[str, Any]:
        """The fields of `GenerationParams` and `SamplingParams` that are set."""
        fields = attrs.asdict(self, recurse=False)
        return {
            name: fields[name] for name in fields if name != "n_ctx" and fields[name] is not None
        }


def refuse_fixed(body: Mapping[str, Any]) -> None:
    """Refuse options that this server, or a request to it, cannot change.

    Raises:
        UnsupportedFieldError: naming the first one.
    """
    options = body.get("options")
    for name, value in options.items() if isinstance(options, Mapping) else ():
        flag, is_neutral = FIXED.get(name, ("", _anything))
        if value is None or is_neutral(value):
            continue
        instead = f"the flag {flag} sets it for all requests" if flag else "leave it out"
        raise UnsupportedFieldError(
            f"'options.{name}' is not supported with this value; {instead}.",
            param=f"options.{name}",
        )


def _anything(_value: Any) -> bool:
    return True
