"""The prompt to fill a gap in a text.

::

    repository  its name
    file        name and text of an extra file       (for each)
    file        name of the file with the gap
    prefix      the text before the gap, and how the gap begins
    suffix      the text after the gap
    middle      (the model continues here)

The repository and the file names are included if the vocabulary has tokens for them. Default names,
and the way that long texts are shortened, are as in llama-server.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.config import Config
from trioserve.engine.backend import Vocab
from trioserve.errors import NotSupportedError
from trioserve.server.model import LoadedModel
from trioserve.server.prompts.text import PromptLike, Tokenizer
from trioserve.types import TokenId

_REPOSITORY = "myproject\n"
_FILE = "filename\n"
#: Precedes an extra file if the vocabulary has no token for files.
_SNIPPET = "\n\n--- snippet ---\n\n"


@attrs.frozen
class File:
    """An extra file that gives the model context."""

    name: str
    text: str


@attrs.frozen(kw_only=True)
class Gap:
    """A text with a gap. `beginning` is the first part of the text in the gap."""

    prefix: str | Sequence[TokenId | str]
    suffix: str | Sequence[TokenId | str]
    extra: tuple[File, ...] = ()
    beginning: str = ""


def missing_tokens(vocab: Vocab) -> str:
    """List the infill tokens that a vocabulary lacks; empty if it has all."""
    fim = vocab.fim
    tokens = {"prefix": fim.prefix, "suffix": fim.suffix, "middle": fim.middle}
    return ". ".join(f"{name} token is missing" for name, token in tokens.items() if token < 0)


def check_infill(model: LoadedModel) -> None:
    """Check that the model supports infill. Raises NotSupportedError."""
    if missing := missing_tokens(model.vocab):
        raise NotSupportedError(f"Infill is not supported by this model: {missing}.")


@attrs.define(eq=False, slots=False)
class InfillPrompts:
    """Makes prompts that ask a model to fill a gap."""

    _config: Config
    _model: LoadedModel
    _tokenizer: Tokenizer

    async def prompt_for(self, gap: Gap, max_tokens: int) -> tuple[TokenId, ...]:
        """Make a prompt. See `Server.infill`."""
        check_infill(self._model)
        vocab, fim, n_ctx = self._model.vocab, self._model.vocab.fim, self._model.n_ctx_seq
        # Do not tokenize text that is certain to be cut off.
        far = 2 * self._tokenizer.max_chars
        before, after = gap.prefix, gap.suffix
        prefix = await self._tokens(
            before[-far:] if isinstance(before, str) else before, "input_prefix"
        )
        suffix = await self._tokens(
            after[:far] if isinstance(after, str) else after, "input_suffix", is_fragment=True
        )
        beginning = await self._tokenizer.prompt_of(
            gap.beginning, add_special=False, is_fragment=True, fits=True
        )
        extra = await self._extra(gap.extra)

        # Reserve room for the output if the context is hardly larger than a batch.
        room = min(self._config.batch_size, n_ctx * 3 // 4)
        n_prefix = room // 4 * 3
        n_suffix = max(0, room // 4 - 2 - len(beginning))
        n_extra = max(0, n_ctx - room - 2 * max(max_tokens, 0))

        before = (fim.prefix, *prefix[-n_prefix:], *beginning.tokens)
        after = (fim.suffix, *suffix[:n_suffix])
        bos = (vocab.bos,) if self._model.info.add_bos else ()
        parts = (after, before) if self._config.spm_infill else (before, after)
        return (*extra[max(0, len(extra) - n_extra) :], *bos, *parts[0], *parts[1], fim.middle)

    async def _tokens(
        self, text: PromptLike, param: str, *, is_fragment: bool = False
    ) -> tuple[TokenId, ...]:
        prompt = await self._tokenizer.prompt_of(
            text, add_special=False, parse_special=False, is_fragment=is_fragment
        )
        prompt.check(self._model.vocab.n_tokens, param)
        return prompt.tokens

    async def _extra(self, files: tuple[File, ...]) -> list[TokenId]:
        fim = self._model.vocab.fim
        tokens: list[TokenId] = []
        if fim.repository >= 0:
            tokens += (fim.repository, *await self._tokens(_REPOSITORY, "input_extra"))
        for file in files:
            if fim.file >= 0:
                tokens += (fim.file, *await self._tokens(f"{file.name}\n", "input_extra"))
            else:
                tokens += await self._tokens(_SNIPPET, "input_extra")
            far = 2 * self._tokenizer.max_chars
            tokens += await self._tokens(file.text[-far:], "input_extra")
        if fim.file >= 0:
            tokens += (fim.file, *await self._tokens(_FILE, "input_extra"))
        return tokens
