"""`LoadedModel`: what is known of a model once it is loaded, and the scales of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import attrs

from trioserve.chat.parse.parser import preserved_tokens
from trioserve.chat.template.builtin import CHATML, LegacyTemplate, source_of
from trioserve.chat.template.render import ChatTemplate
from trioserve.config import Config
from trioserve.engine import EmbeddingEngine, Engine
from trioserve.engine.backend import Vocab
from trioserve.engine.loop import EngineLoop
from trioserve.errors import (
    InvalidRequestError,
    ModelLoadError,
    NotSupportedError,
    ServerSleepingError,
    TemplateError,
)
from trioserve.llama.model import apply_chat_template
from trioserve.types import (
    AdapterInfo,
    Adapters,
    FimTokens,
    GenerationParams,
    Grammar,
    Modalities,
    ModelInfo,
    TokenId,
)


@attrs.frozen(kw_only=True)
class VocabFacts:
    """What is known of a vocabulary that is not in memory. It has no texts of tokens."""

    n_tokens: int
    max_token_bytes: int
    end_of_generation: frozenset[TokenId]
    bos: TokenId
    fim: FimTokens
    pieces: Sequence[bytes] = ()
    names: Sequence[bytes] = ()

    @classmethod
    def of(cls, vocab: Vocab) -> Self:
        """Note what is small."""
        return cls(
            n_tokens=vocab.n_tokens,
            max_token_bytes=vocab.max_token_bytes,
            end_of_generation=vocab.end_of_generation,
            bos=vocab.bos,
            fim=vocab.fim,
        )

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = False,
        parse_special: bool = True,
        is_fragment: bool = False,
        stop: Callable[[int], bool] = lambda _n: False,
    ) -> tuple[TokenId, ...]:
        """Raise ServerSleepingError."""
        raise ServerSleepingError

    def detokenize(self, tokens: Sequence[TokenId], *, special: bool = True) -> bytes:
        """Raise ServerSleepingError."""
        raise ServerSleepingError


@attrs.frozen(kw_only=True)
class LoadedModel:
    """A model, and what the configuration says of requests to it.

    While the server sleeps, `vocab` is a `VocabFacts`.
    """

    info: ModelInfo
    vocab: Vocab
    n_slots: int
    n_ctx_seq: int  # tokens that the context of one request holds
    template: ChatTemplate
    template_variables: dict[str, Any]
    #: Control tokens that structure a message, so that the parser has to see them.
    preserved_tokens: frozenset[TokenId]
    #: Whether `Prompt.divergence_points` are of use.
    keeps_checkpoints: bool
    #: The parameters of a request that sets none.
    defaults: GenerationParams
    #: What it takes beside text.
    modalities: Modalities = attrs.field(factory=Modalities)
    #: Whether Whisper transcribes recordings, and not the model.
    has_whisper: bool = False
    #: How a model for embeddings pools them, "rank" for one that ranks; None: it makes text.
    pooling: str | None = None

    @classmethod
    def introduce(cls, engine: EngineLoop, config: Config) -> Self:
        """Get to know a model. It takes a while: the template is compiled and tried out.

        Raises:
            ModelLoadError: the chat template cannot be used.
        """
        info, vocab = engine.info, engine.vocab
        try:
            template = _template(info, config)
            preserved = preserved_tokens(template.format, vocab.pieces, vocab.names)
        except TemplateError as error:
            raise ModelLoadError(f"The chat template cannot be used: {error.message}") from error
        variables = config.template_variables
        if config.reasoning == "auto" and template.capabilities.thinking_variable:
            variables.setdefault("enable_thinking", True)
        return cls(
            info=info,
            vocab=vocab,
            n_slots=engine.n_slots,
            n_ctx_seq=engine.n_ctx_seq,
            template=template,
            template_variables=variables,
            preserved_tokens=preserved,
            keeps_checkpoints=isinstance(engine, Engine) and engine.keeps_checkpoints,
            modalities=_modalities(engine),
            has_whisper=config.transcription_model is not None,
            pooling=engine.pooling if isinstance(engine, EmbeddingEngine) else None,
            defaults=GenerationParams(
                sampling=config.sampling,
                max_tokens=config.n_predict,
                n_keep=config.n_keep,
                stop=config.stop,
                cache_prompt=config.cache_prompt,
                grammar=_default_grammar(config),
            ),
        )

    def asleep(self) -> Self:
        """Make what stays of it while the server sleeps."""
        return attrs.evolve(self, vocab=VocabFacts.of(self.vocab))

    def check_generates(self) -> None:
        """Refuse to make text. Raises NotSupportedError if the model makes none."""
        if self.pooling is not None:
            raise NotSupportedError(
                "This server computes embeddings and generates no text. "
                "Start it without `--embeddings` and `--reranking`"
            )

    @property
    def transcribes(self) -> bool:
        """Whether there is something that turns recordings into text."""
        return self.has_whisper or (self.pooling is None and self.modalities.audio)

    def check_transcribes(self) -> None:
        """Refuse to transcribe recordings. Raises NotSupportedError if nothing here does."""
        if not self.transcribes:
            raise NotSupportedError(
                "The current model does not support audio input. Start the server with a model "
                "that hears, and its `--mmproj`, or with `--transcription-model`"
            )

    def check_embeds(self) -> None:
        """Refuse to make embeddings. Raises NotSupportedError if the model makes none."""
        if self.pooling is None:
            raise NotSupportedError(
                "This server does not support embeddings. Start it with `--embeddings`"
            )
        if self.pooling == "rank":
            raise NotSupportedError("This server ranks documents and computes no embeddings.")

    def check_ranks(self) -> None:
        """Refuse to rank documents. Raises NotSupportedError if the model does not."""
        if self.pooling != "rank":
            raise NotSupportedError(
                "This server does not support reranking. Start it with `--reranking`"
            )


def _modalities(engine: EngineLoop) -> Modalities:
    projector = engine.projector
    if projector is None:
        return Modalities()
    return Modalities(vision=projector.sees, audio=projector.hears)


def _template(info: ModelInfo, config: Config) -> ChatTemplate:
    given = config.chat_template or info.chat_template or CHATML
    if not config.jinja:
        return LegacyTemplate(given, apply_chat_template)
    return ChatTemplate(source_of(given), bos_token=info.bos_token, eos_token=info.eos_token)


def _default_grammar(config: Config) -> Grammar | None:
    if config.json_schema:
        return Grammar("json_schema", config.json_schema, param="json_schema")
    return Grammar("gbnf", config.grammar) if config.grammar else None


class AdapterScales:
    """The adapters of a server, and the scales of requests that name none. On the event loop.

    Args:
        infos: the adapters that were loaded; their ids are their places.
    """

    def __init__(self, infos: Sequence[AdapterInfo]) -> None:
        self.infos = infos
        self._scales = [info.scale for info in infos]

    @property
    def scales(self) -> tuple[float, ...]:
        """The scale of each adapter, for requests that name none."""
        return tuple(self._scales)

    @property
    def current(self) -> Adapters:
        """The adapters of requests that name none."""
        return _in_use(enumerate(self._scales))

    def set(self, scales: Mapping[int, float]) -> None:
        """Change them for requests from now on; an adapter that is not named gets 0.

        Raises:
            InvalidRequestError: there is no such adapter; nothing has changed.
        """
        self._check(scales)
        self._scales = [scales.get(id_, 0.0) for id_ in range(len(self.infos))]

    def choose(self, given: Sequence[tuple[int, float]]) -> Adapters:
        """Say what a request gets that asks for these; for none, the ones that all get.

        Raises:
            InvalidRequestError: there is no such adapter.
        """
        if not given:
            return self.current
        scales = dict(given)
        self._check(scales)
        return _in_use(sorted(scales.items()))

    def _check(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if not 0 <= id_ < len(self.infos):
                n = len(self.infos)
                known = f"ids run from 0 to {n - 1}" if n else "the server was started without"
                raise InvalidRequestError(f"There is no LoRA adapter {id_}: {known}.", param="lora")


def _in_use(scales: Iterable[tuple[int, float]]) -> Adapters:
    return tuple((id_, float(scale)) for id_, scale in scales if scale)
