"""`LoadedModel`: the properties of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import attrs

from trioserve.chat.params import ChatParams
from trioserve.chat.parse.parser import preserved_tokens
from trioserve.chat.template.builtin import CHATML, CHATML_TOKENS, LegacyTemplate, source_of
from trioserve.chat.template.plain import plain_for
from trioserve.chat.template.render import ChatTemplate
from trioserve.config import Config
from trioserve.engine import EmbeddingEngine, Engine
from trioserve.engine.backend import Vocab
from trioserve.engine.loop import EngineLoop
from trioserve.errors import ModelLoadError, NotSupportedError, ServerSleepingError, TemplateError
from trioserve.llama.model import apply_chat_template
from trioserve.types import FimTokens, GenerationParams, Grammar, Modalities, ModelInfo, TokenId


@attrs.frozen(kw_only=True)
class VocabFacts:
    """The properties of a vocabulary that is not in memory, without the texts of tokens."""

    n_tokens: int
    end_of_generation: frozenset[TokenId]
    bos: TokenId
    fim: FimTokens
    pieces: Sequence[bytes] = ()
    names: Sequence[bytes] = ()
    control: Sequence[TokenId] = ()

    def tokenize(self, *_args: Any, **_options: Any) -> Any:
        """Raise ServerSleepingError."""
        raise ServerSleepingError

    detokenize = tokenize
    max_token_bytes = property(tokenize)


#: The classes of a reranker that was made from a chat model. The first one is its score.
_OF_RERANKERS = ("yes", "no")


@attrs.frozen(kw_only=True)
class LoadedModel:
    """A model, and the configuration for requests to it.

    While the server sleeps, `vocab` is a `VocabFacts`.
    """

    info: ModelInfo
    #: The model's name, and its aliases.
    names: tuple[str, ...]
    vocab: Vocab
    n_slots: int
    n_ctx_seq: int  # tokens that the context of one request holds
    template: ChatTemplate
    template_variables: dict[str, Any]
    #: Control tokens that structure a message. The parser needs their names in the output.
    preserved_tokens: frozenset[TokenId]
    #: The names of all control tokens, as texts of strangers may have them.
    control_names: tuple[str, ...] = ()
    #: True if `Prompt.divergence_points` are useful.
    keeps_checkpoints: bool
    #: True if the model file or the configuration has a chat template; None: no chats.
    has_chat_template: bool | None = None
    #: Why a request may be shorter than the context, and what to set; None: it may not.
    context_advice: str | None = None
    #: The parameters of a request that sets none.
    defaults: GenerationParams
    #: The supported inputs in addition to text.
    modalities: Modalities = attrs.field(factory=Modalities)
    #: True if Whisper transcribes recordings instead of the model.
    has_whisper: bool = False
    #: The pooling of an embedding model, "rank" for a reranker; None: it generates text.
    pooling: str | None = None
    #: The pooling of embeddings, also of a model that generates text; None: it makes none.
    embedding_pooling: str | None = None
    #: The voices that texts are spoken with; None: the server does not speak.
    voices: Sequence[str] | None = None
    #: The classes of a model that classifies; a reranker has at most one, or says yes or no.
    classes: Sequence[str] = ()

    @classmethod
    def introduce(
        cls, engine: EngineLoop, config: Config, voices: Sequence[str] | None = None
    ) -> Self:
        """Read the properties of a model. It is slow: it compiles the template and tries it out.

        Raises:
            ModelLoadError: the chat template cannot be used.
        """
        info, vocab = engine.info, engine.vocab
        has_template = bool(config.chat_template or info.chat_template)
        if not has_template:
            info = attrs.evolve(info, chat_template=_fallback(vocab, config))
        try:
            template = template_of(info, config)
            preserved = preserved_tokens(template.format, vocab.control, vocab.names)
            template.repairs  # noqa: B018 - found here, not by the first chat on the event loop
        except TemplateError as error:
            raise ModelLoadError(f"The chat template cannot be used: {error.message}") from error
        variables = config.template_variables
        if config.reasoning == "auto" and template.capabilities.thinking.is_flag:
            variables.setdefault("enable_thinking", True)
        pooling = engine.pooling if isinstance(engine, EmbeddingEngine) else None
        return cls(
            info=info,
            names=(info.name, *config.aliases),
            vocab=vocab,
            n_slots=engine.n_slots,
            n_ctx_seq=engine.n_ctx_seq,
            template=template,
            template_variables=variables,
            preserved_tokens=preserved,
            control_names=tuple(
                vocab.names[each].decode(errors="replace") for each in vocab.control
            ),
            keeps_checkpoints=isinstance(engine, Engine) and engine.keeps_checkpoints,
            modalities=Modalities()
            if (projector := engine.projector) is None
            else Modalities(vision=projector.sees, audio=projector.hears),
            has_whisper=config.transcription_model is not None,
            pooling=pooling,
            embedding_pooling=engine.embedding_pooling if isinstance(engine, Engine) else pooling,
            voices=voices,
            classes=engine.labels if isinstance(engine, EmbeddingEngine) else (),
            has_chat_template=has_template if pooling is None else None,
            context_advice=_context_advice(engine, config),
            defaults=GenerationParams(
                sampling=config.sampling,
                max_tokens=config.n_predict,
                n_keep=config.n_keep,
                stop=config.stop,
                cache_prompt=config.cache_prompt,
                grammar=_default_grammar(config),
            ),
        )

    def variables_of(self, chat: ChatParams) -> dict[str, Any]:
        """The variables of the template in a chat."""
        return {**self.template_variables, **chat.template_kwargs}

    def asleep(self) -> Self:
        """Make a copy for the time in which the server sleeps."""
        vocab = self.vocab
        facts = VocabFacts(
            n_tokens=vocab.n_tokens,
            end_of_generation=vocab.end_of_generation,
            bos=vocab.bos,
            fim=vocab.fim,
        )
        return attrs.evolve(self, vocab=facts)

    def check_generates(self) -> None:
        """Check that the model generates text. Raises NotSupportedError."""
        if self.pooling is not None:
            raise NotSupportedError(
                "This server computes embeddings and generates no text. "
                "Start it without `--embeddings` and `--reranking`"
            )

    @property
    def transcribes(self) -> bool:
        """True if the server can transcribe recordings."""
        return self.has_whisper or (self.pooling is None and self.modalities.audio)

    def check_transcribes(self) -> None:
        """Check that the server can transcribe recordings. Raises NotSupportedError."""
        if not self.transcribes:
            raise NotSupportedError(
                "The current model does not support audio input. Start the server with a model "
                "that hears, and its `--mmproj`, or with `--transcription-model`"
            )

    def check_speaks(self, param: str | None = None) -> None:
        """Check that the server speaks. Raises NotSupportedError, which may name a field."""
        if self.voices is None:
            raise NotSupportedError(
                "This server does not speak. Start it with `--tts`, which names a model that does",
                param=param,
            )

    def check_embeds(self) -> None:
        """Check that the model computes embeddings. Raises NotSupportedError."""
        if self.embedding_pooling is None:
            raise NotSupportedError(
                "This server does not support embeddings. Start it with `--embeddings`, or without "
                "`--embd-ctx-size 0`"
            )
        if self.pooling == "rank":
            raise NotSupportedError("This server ranks documents and computes no embeddings.")

    def check_classifies(self) -> None:
        """Check that the model has a head that scores texts. Raises NotSupportedError."""
        if self.pooling != "rank":
            raise NotSupportedError(
                "This server does not classify texts. Start it with `--reranking` and a model that "
                "has a classification head"
            )

    def check_scores(self) -> None:
        """Check that the model compares texts. Raises NotSupportedError."""
        if self.embedding_pooling is None:
            raise NotSupportedError(
                "This server does not score texts. Start it with `--reranking`, or with "
                "`--embeddings`"
            )
        if self.pooling == "rank":
            self.check_ranks()

    def check_ranks(self) -> None:
        """Check that the model ranks documents. Raises NotSupportedError."""
        if self.pooling != "rank":
            raise NotSupportedError(
                "This server does not support reranking. Start it with `--reranking`"
            )
        if len(self.classes) > 1 and tuple(self.classes) != _OF_RERANKERS:
            raise NotSupportedError(
                f"This model has {len(self.classes)} classes, and none of them is a score: ask "
                "`/v1/classify` for their probabilities"
            )


def _context_advice(engine: EngineLoop, config: Config) -> str | None:
    n_train = engine.info.n_ctx_train
    n_ctx = config.ctx_size or n_train
    if engine.n_ctx_seq >= min(n_ctx, config.kv_unified_per_slot or n_train):
        return None
    return (
        f"A request may have {engine.n_ctx_seq} tokens, because --parallel {engine.n_slots} "
        f"divides the context of {n_ctx}; for longer ones, set a smaller --parallel or "
        "--kv-unified."
    )


def _fallback(vocab: Vocab, config: Config) -> str:
    """Choose the template of a model that has none: ChatML if it has the tokens, or plain text."""

    def tokens(text: str) -> Sequence[TokenId]:
        return vocab.tokenize(text, is_fragment=True)

    if not config.jinja or all(len(tokens(each)) == 1 for each in CHATML_TOKENS):
        return CHATML
    return plain_for(lambda text: vocab.detokenize(tokens(text)).strip() == text.encode())


def template_of(info: ModelInfo, config: Config) -> ChatTemplate:
    """Make the chat template of a model. It is slow. Raises TemplateError."""
    given = config.chat_template or info.chat_template or CHATML
    if not config.jinja:
        return LegacyTemplate(given, apply_chat_template)
    return ChatTemplate(source_of(given), bos_token=info.bos_token, eos_token=info.eos_token)


def _default_grammar(config: Config) -> Grammar | None:
    if config.json_schema:
        return Grammar("json_schema", config.json_schema, param="json_schema")
    return Grammar("gbnf", config.grammar) if config.grammar else None
