"""LlamaBackend: a model and a context that generates text, for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from weakref import WeakSet

import attrs

from trioserve.config import Config
from trioserve.engine.backend import KVMemory, MediaPiece
from trioserve.engine.speaker import SpeechBackend
from trioserve.errors import InvalidRequestError, ModelLoadError, NotSupportedError
from trioserve.llama import head_loading, head_texts, identity, sampler_chain, state_file
from trioserve.llama.adapters import LoadedAdapters, apply_control_vectors
from trioserve.llama.batch import LlamaBatch, decode_pieces
from trioserve.llama.context import (
    Context,
    draft_rows,
    open_context,
    sampled_rows,
    thread_choices,
    threads,
)
from trioserve.llama.drafter import LlamaDrafter, divide, load_drafter
from trioserve.llama.embedding import LlamaEmbedder, pooling_beside
from trioserve.llama.grammar.compiler import Compiler
from trioserve.llama.grammar.matcher import CompiledGrammar, matcher_for
from trioserve.llama.heads import HeadDrafter
from trioserve.llama.machine import free_memory
from trioserve.llama.media.projector import LlamaProjector
from trioserve.llama.model import LlamaModel, Progress
from trioserve.llama.sampler import LlamaSampler, add_score
from trioserve.llama.sampler_chain import Offload
from trioserve.llama.speech.generator import FAMILIES
from trioserve.log import get_logger
from trioserve.models import resolve_projector
from trioserve.models.gguf import check_file
from trioserve.types import (
    AdapterInfo,
    Adapters,
    Constraint,
    ModelInfo,
    PromptScores,
    SamplingParams,
    SlotState,
    TokenId,
)

_log = get_logger("llama")


class LlamaBackend:
    """Implements `trioserve.engine.backend.Backend` with llama.cpp.

    It may be made in one thread, used in another and closed in a third. `info`, `vocab`,
    `check_sampling` and `compile` may be used by any thread at any time.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: Context,
        *,
        n_slots: int,
        thread_choices: tuple[range, range],
        n_spare_cores: int = 0,
        max_n_ctx_seq: int | None = None,  # None: as in training
        adapters: LoadedAdapters | None = None,
        config: Config | None = None,
    ) -> None:
        self._config = config or Config()
        self._model = model
        self._context = context
        self.memory: KVMemory = context.memory
        self._state_prefix = self.memory.save(0)[: state_file.PREFIX]
        self._compiler = Compiler(model.vocab, n_threads=min(max(1, n_spare_cores), n_slots))
        #: As `Backend` has it. It raises ServerClosingError once the model is closed.
        self.compile = self._compiler.compile
        self._samplers: WeakSet[LlamaSampler] = WeakSet()
        self.info: ModelInfo = model.info
        self.vocab = model.vocab
        self.n_ctx: int = context.n_ctx
        self.n_ctx_seq: int = min(context.n_ctx_seq, max_n_ctx_seq or model.info.n_ctx_train)
        self.n_batch: int = context.n_batch
        self.n_outputs: int = sampled_rows(model, self._config, context.n_seqs)
        self.n_score_rows: int = context.n_outputs - self.n_outputs
        self.spare_ram: int | None = None
        self._lora = LoadedAdapters(model, ()) if adapters is None else adapters
        #: As `Backend` has it.
        self.remove_adapter = self._lora.remove
        #: As `Backend` has it. `trioserve.llama.load` sets one that uses another process.
        self.try_adapter: Callable[[Path], None] = check_file
        self.drafters: Sequence[LlamaDrafter | HeadDrafter] = ()
        self._head: HeadDrafter | None = None
        self.projector: LlamaProjector | None = None
        self.n_slots: int = n_slots
        self.thread_choices = thread_choices
        self._offload = (
            Offload(context, has_drafts=draft_rows(model, self._config) > 0)
            if self._config.backend_sampling
            else None
        )
        # Chains are given to the context by one thread.
        self.n_spare_cores = 0 if self._config.backend_sampling else n_spare_cores
        self.n_seqs: int = context.n_seqs
        self.unified: bool = context.unified
        self.is_elastic: bool = context.is_elastic
        self.n_ctx_copies: int = context.n_copies
        self.can_cut: bool = model.can_cut
        self.cuttable: int = self.n_ctx_seq if self.can_cut else model.cuttable
        self.sliding_window: int = model.n_swa if self.cuttable > 0 else 0
        self.rollback = context.rollback
        # Layers with a sliding window have a separate cache, in which sequences that went back to a
        # checkpoint share no cells. It has room for all their windows, but no more cells than the
        # context.
        windows = model.window * self.n_seqs + context.n_ubatch
        self.window: int = model.window if self.unified and windows >= self.n_ctx else 0
        self.batch = LlamaBatch(self.n_batch, n_vocab=self.vocab.n_tokens, n_seqs=self.n_seqs)
        kind = "elastic" if self.is_elastic else "unified" if self.unified else "split"
        _log.info("KV cache", layout=kind, tokens=self.n_ctx, longest_request=self.n_ctx_seq)

    @classmethod
    def load(cls, config: Config, *, progress: Progress | None = None) -> LlamaBackend:
        """Load a model and make its context; see `trioserve.llama.load`."""
        draft_progress = None
        if config.spec_draft_model is not None and progress is not None:
            progress, draft_progress = divide(config, progress)
        with ExitStack() as made:  # it is closed where the rest fails
            model = made.enter_context(LlamaModel.load(config, progress=progress))
            if model.arch in FAMILIES.values():
                raise ModelLoadError(f"The model in {model.info.path} speaks: name it with --tts.")
            projector = None
            if (path := resolve_projector(config)) is not None:
                projector = LlamaProjector.load(path, model, config)
                made.callback(projector.close)
            max_chunk = projector.max_chunk if projector is not None else 0
            max_n_ctx_seq = model.max_n_ctx_seq(config)
            adapters = LoadedAdapters(model, config.lora_files)
            context = made.enter_context(open_context(model, config, max_chunk=max_chunk))
            if not context.has_cache:
                raise ModelLoadError(
                    f"The model in {model.info.path} is for embeddings and does not generate text: "
                    "it needs --embeddings, or --reranking if it ranks documents."
                )
            apply_control_vectors(
                model, context, config.control_vector_files, config.control_vector_layer_range
            )
            # When fewer threads decode, the cores of the others are no more to spare than before.
            n_spare = max(0, threads(0) - threads(config.threads))
            backend = cls(
                model,
                context,
                n_slots=config.parallel,
                n_spare_cores=n_spare,
                thread_choices=thread_choices(config),
                max_n_ctx_seq=max_n_ctx_seq,
                adapters=adapters,
                config=config,
            )
            made.pop_all()
            made.callback(backend.close)
            backend.projector = projector
            if config.head_type is not None:
                head = head_loading.load_head(model, context, config, draft_progress)
                # It has every sequence, too.
                backend.drafters, backend._head, backend.memory = (head,), head, head.memory
            elif config.spec_draft_model is not None:
                backend.drafters = (load_drafter(model, context, config, draft_progress),)
            made.pop_all()
        return backend

    #: As `Backend` has it.
    speaker: Callable[[], SpeechBackend] | None = None

    @property
    def embedding_pooling(self) -> str | None:
        """The pooling of `embedder`; None without one."""
        return pooling_beside(self._model, self._config) if self._config.embd_ctx_size else None

    def embedder(self) -> LlamaEmbedder:
        """Make a context for embeddings, as `Backend` has it."""
        return LlamaEmbedder.beside(self._model, self._config)

    def set_adapters(self, adapters: Adapters) -> None:
        """Use these LoRA adapters, as `Backend` has it."""
        self._lora.use(self._context, adapters)

    @property
    def beyond_interface(self) -> tuple[str, ...]:
        """The means in use that llama.cpp's interface does not provide; see ``docs/upstream``."""
        means = {
            "lazy_pages": self._context.is_lazy,
            "staged": self._head is not None,
            "encoder_threads": self.projector is not None and self.projector.can_set_threads,
        }
        return tuple(name for name, is_used in means.items() if is_used)

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The LoRA adapters that were loaded, by id. One that was removed has no path."""
        return self._lora.infos

    def add_adapter(self, path: Path) -> int:
        """Load a LoRA adapter, between two decodes, as `Backend` has it."""
        return self._lora.add(str(path), 0.0)

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from the next `decode` on."""
        self._context.set_threads(count)
        for drafter in self.drafters:
            drafter.set_threads(count)

    def decode(self) -> None:
        """Run the batch, as `Backend` has it."""
        if self._compiler.pool.due:
            self._compiler.pool.start()
        self._context.decode(self.batch)
        if self._head is not None:
            self._head.observe(self.batch)

    def decode_media(self, pieces: Sequence[MediaPiece]) -> list[int]:
        """Decode parts of chunks of media, as `Backend` has it.

        Raises also NotSupportedError: the model takes text only; EngineError: they do not form a
        batch.
        """
        if self.projector is None:
            raise NotSupportedError("The model takes text only.")
        rows = decode_pieces(
            self._context,
            pieces,
            self.projector.width,
            has_sections=self.projector.has_sections,
        )
        if self._head is not None:
            self._head.observe_media(pieces, rows)
        return rows

    def interrupt(self) -> None:
        """Interrupt the running decode. Call it from any thread.

        That of a recurrent or hybrid model is not interrupted, because its state would be lost, and
        none that also samples: the random numbers it drew would be lost, and other sequences would
        continue with different tokens.
        """
        if self.cuttable and self._offload is None:
            self._context.interrupt()

    def sampler(
        self,
        params: SamplingParams,
        prompt: Sequence[TokenId],
        constraint: Constraint | None = None,
    ) -> LlamaSampler:
        """Make the sampler of a task, as `Backend` has it.

        Where the grammar allows only the end, the output ends, whatever the biases are.

        Raises:
            InvalidRequestError: a parameter cannot be used with this model, or forbids all that
                the grammar begins with.
        """
        matcher = None
        if constraint is not None:
            if not isinstance(constraint, CompiledGrammar):
                raise TypeError("the constraint was compiled by another backend")
            matcher = matcher_for(constraint, sampler_chain.banned(params, self.vocab))
        sampler = LlamaSampler(
            self._context,
            self.vocab,
            params,
            prompt,
            n_ctx=self.n_ctx_seq,
            matcher=matcher,
            offload=self._offload,
            on_close=self._samplers.discard,
        )
        self._samplers.add(sampler)
        return sampler

    def check_sampling(self, params: SamplingParams) -> None:
        """Check parameters as `sampler` does, as `Backend` has it."""
        sampler_chain.check(params, self.vocab)

    def score(self, scores: PromptScores, row: int, tokens: Sequence[TokenId]) -> None:
        """Add how probable each token was, as `Backend` has it."""
        self.vocab.is_read_later = True
        for i, token in enumerate(tokens, start=row):
            add_score(scores, self._context.logits(i, self.vocab.n_tokens), token)

    def state_identity(self) -> tuple[str, tuple[str, ...]]:
        """Identify what a state depends on; see `trioserve.llama.identity`."""
        projector = "" if self.projector is None else self.projector.fingerprint
        shape: tuple[object, ...] = (
            self.unified,
            self.n_seqs if not self.unified else 1,
            projector,
        )
        if self._head is not None:
            shape = (*shape, *self._head.identity())
        return identity.of_states(self._config, Path(self.info.path), shape), tuple(
            identity.of_file(Path(one.path)) if one.path else "" for one in self.adapters
        )

    def write_state(self, path: Path, saved: SlotState) -> int:
        """Write a file that llama-server can read too, as `Backend` has it.

        It has no state of a head, which catches up with the text once that is restored.
        """
        projector = "" if self.projector is None else self.projector.fingerprint
        saved = attrs.evolve(saved, state=head_texts.split(saved.state)[0])
        return state_file.write(path, saved, self.adapters, projector=projector)

    def read_state(self, path: Path, adapters: Adapters) -> tuple[SlotState, int]:
        """Read a file of `write_state` or of llama-server, as `Backend` has it."""
        free = free_memory()
        if free is not None and path.stat().st_size > free:
            raise InvalidRequestError(
                "Unable to restore slot: the file is larger than the memory that is free.",
                param="filename",
            )
        saved, size = state_file.read(
            path,
            self._state_prefix,
            self.adapters,
            adapters,
            max_tokens=self.n_ctx_seq,
            projector=None if self.projector is None else self.projector.fingerprint,
        )
        if any(key >= self.vocab.n_tokens for key in saved.keys):
            raise InvalidRequestError(
                "Unable to restore slot: the file is from a model with another vocabulary.",
                param="filename",
            )
        return attrs.evolve(saved, state=head_texts.split(saved.state)[0]), size

    def close(self) -> None:
        """Free drafters, samplers, the projector, the context and the model; twice is fine."""
        for drafter in self.drafters:
            drafter.close()
        for sampler in list(self._samplers):
            sampler.close()
        if self.projector is not None:
            self.projector.close()
        self._compiler.close()
        self._context.close()
        self._model.close()

    def __enter__(self) -> LlamaBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
