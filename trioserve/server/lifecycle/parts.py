"""`Parts`: what a `Server` is made of while its model is loaded."""

from __future__ import annotations

import attrs
import trio

from trioserve.config import Config
from trioserve.engine import EmbeddingEngine, Engine
from trioserve.engine.loop import EngineLoop
from trioserve.server.dispatch import Dispatcher
from trioserve.server.generation.chats import Chats
from trioserve.server.generation.completions import Completions
from trioserve.server.generation.embeddings import Embedder
from trioserve.server.generation.requests import Common, Requests
from trioserve.server.generation.slots import SlotFiles
from trioserve.server.lifecycle.engine import Health
from trioserve.server.limits.admission import Admission, Queue
from trioserve.server.limits.workers import Workers
from trioserve.server.media.loader import MediaLoader
from trioserve.server.model import AdapterScales, LoadedModel
from trioserve.server.prompts.chats import ChatPrompts
from trioserve.server.prompts.infill import InfillPrompts
from trioserve.server.prompts.media import MediaPrompts
from trioserve.server.prompts.tokens import PromptLog, Tokenizer
from trioserve.server.transcription import Transcriber, Transcriptions
from trioserve.server.transcription.model import ModelTranscriber
from trioserve.server.transcription.whisper import WhisperSettings, WhisperTranscriber


@attrs.frozen(kw_only=True)
class Generation:
    """What a server has that makes text."""

    engine: Engine
    completions: Completions
    chats: Chats
    slot_files: SlotFiles


class Parts:
    """All parts, made at once, for one engine. A server makes either text or embeddings."""

    def __init__(
        self, common: Common, model: LoadedModel, loop: EngineLoop, dispatcher: Dispatcher
    ) -> None:
        config = common.config
        self.model = model
        self.loop = loop
        self.dispatcher = dispatcher
        self.admission = Admission(config, dispatcher, model.n_slots)
        self.health = Health(loop, dispatcher, self.admission, config.watchdog_timeout)
        self.queue = Queue(self.health.status)
        self.requests = Requests(common, loop, dispatcher, self.admission, model.info.name)
        self.workers = Workers(self.admission)
        self.tokenizer = Tokenizer(model.vocab, self.admission, self.workers, model.n_ctx_seq)
        self.adapters = AdapterScales(loop.adapters)
        self._media_loader = MediaLoader.of(config)
        self.media = MediaPrompts(
            model.modalities,
            loop.projector,
            self._media_loader,
            self.workers,
            common.memory,
            n_ctx=model.n_ctx_seq,
            video_fps=config.video_fps,
        )
        self.prompts = ChatPrompts(model, self.tokenizer, self.workers, self.media)
        self.infill = InfillPrompts(config, model, self.tokenizer)
        self._generation: Generation | None = None
        self._embedder: Embedder | None = None
        self._transcriptions: Transcriptions | None = None
        if isinstance(loop, Engine):
            completions = Completions(
                loop,
                self.requests,
                self.tokenizer,
                self.media,
                self.adapters,
                common.cache_sharing,
                special=config.special,
                prompt_log=PromptLog(config.log_prompts_dir, model.vocab)
                if config.log_prompts_dir
                else None,
            )
            self._generation = Generation(
                engine=loop,
                completions=completions,
                chats=Chats(
                    config,
                    model,
                    self.tokenizer,
                    self.workers,
                    self.prompts,
                    completions,
                    common.cache_sharing,
                ),
                slot_files=SlotFiles(loop, dispatcher, self.adapters, config.slot_save_path),
            )
        elif isinstance(loop, EmbeddingEngine):
            self._embedder = Embedder(config, loop, self.requests, self.workers, self.media)
        if model.transcribes:
            self._transcriptions = Transcriptions(
                self._transcriber(config, model),
                self._media_loader,
                common.memory,
                self.requests,
                common.observers,
            )

    def _transcriber(self, config: Config, model: LoadedModel) -> Transcriber:
        if config.transcription_model is not None:
            settings = WhisperSettings(model=config.transcription_model, offline=config.offline)
            return WhisperTranscriber(settings, max_waiting=config.max_queue)
        return ModelTranscriber(
            self.generation().chats,
            self.workers,
            model.defaults,
            template=model.info.chat_template or "",
            rate=self.media.audio_rate,
            instruction=config.transcription_prompt,
        )

    def generation(self) -> Generation:
        """The parts that make text. Raises NotSupportedError where there are none."""
        self.model.check_generates()
        assert self._generation is not None
        return self._generation

    def embedder(self) -> Embedder:
        """What makes embeddings. Raises NotSupportedError where nothing does."""
        self.model.check_embeds()
        assert self._embedder is not None
        return self._embedder

    def transcriptions(self) -> Transcriptions:
        """What transcribes recordings. Raises NotSupportedError where nothing does."""
        self.model.check_transcribes()
        assert self._transcriptions is not None
        return self._transcriptions

    def ranker(self) -> Embedder:
        """What ranks documents. Raises NotSupportedError where nothing does."""
        self.model.check_ranks()
        assert self._embedder is not None
        return self._embedder

    async def close(self) -> None:
        """End what runs, and wait until no thread uses the vocabulary any more."""
        self.admission.closed = True
        self.requests.end_all("The server was closed.")
        with trio.CancelScope(shield=True):
            await self._media_loader.aclose()
            if self._transcriptions is not None:
                await self._transcriptions.aclose()
            await self.workers.wait_idle()
            if self._generation is not None:
                await self._generation.completions.wait_idle()
