"""`EngineServices`: the parts of a `Server` that exist while its model is loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.engine import EmbeddingEngine, Engine
from trioserve.engine.loop import EngineLoop
from trioserve.fair_limiter import Workers
from trioserve.log import get_logger
from trioserve.server.adapters import AdapterScales
from trioserve.server.context import RequestContext
from trioserve.server.dispatch import Dispatcher
from trioserve.server.generation.embeddings import Embedder
from trioserve.server.generation.requests import Admission, Requests, ServerResources
from trioserve.server.generation.slots import SlotFiles
from trioserve.server.generation.text import TextGenerator
from trioserve.server.lifecycle.beside import EmbeddingsBeside
from trioserve.server.lifecycle.engine import Driver, Health
from trioserve.server.lifecycle.speech import SpeechParts
from trioserve.server.media.loader import MediaLoader
from trioserve.server.model import LoadedModel
from trioserve.server.prompts.infill import InfillPrompts
from trioserve.server.prompts.media import MediaPrompts
from trioserve.server.prompts.text import ChatPrompts, Tokenizer
from trioserve.server.speech.speaker import Speaker
from trioserve.server.transcription.model import ModelTranscriber
from trioserve.server.transcription.transcript import Transcriber, Transcriptions
from trioserve.server.transcription.whisper import WhisperSettings, WhisperTranscriber

_log = get_logger("trioserve.server")

#: Seconds after which the log reports that the engine is still in use at its end.
_DELAY = 10.0


@attrs.define(eq=False, slots=False)
class EngineServices:
    """The parts of a server that exist while its model is loaded, for one engine.

    The engine generates either text or embeddings; beside text, there may be others.
    """

    _resources: ServerResources
    model: LoadedModel
    loop: EngineLoop
    dispatcher: Dispatcher
    _drive: Driver
    _speech: SpeechParts | None = None  # runs beside

    def __attrs_post_init__(self) -> None:
        resources, model, loop, dispatcher = self._resources, self.model, self.loop, self.dispatcher
        config = resources.config
        dispatcher.step = resources.step
        self.admission = Admission(config, resources.keys, dispatcher, model.n_slots)
        self.health = Health(loop, dispatcher, self.admission, config.watchdog_timeout)
        self.requests = Requests(resources, loop, dispatcher, self.admission)
        self.workers = Workers()
        self.tokenizer = Tokenizer(model.vocab, self.workers, model.n_ctx_seq)
        self.adapters = AdapterScales(loop.adapters)
        self._loader = MediaLoader.of(config)
        memory, fps = resources.memory, config.video_fps
        self.media = MediaPrompts(model, loop.projector, self._loader, self.workers, memory, fps)
        self.prompts = ChatPrompts(model, self.tokenizer, self.workers, self.media)
        self.infill = InfillPrompts(config, model, self.tokenizer)
        if isinstance(loop, Engine):
            #: Generates text, if the model does.
            self.text = TextGenerator(
                model,
                loop,
                self.requests,
                self.tokenizer,
                self.workers,
                self.prompts,
                self.adapters,
            )
            self._slots = SlotFiles(loop, dispatcher, self.adapters, config)
            texts = MediaPrompts(model, None, self._loader, self.workers, memory, fps)
            self._beside = EmbeddingsBeside(resources, loop, self._drive, self.workers, texts)
        elif isinstance(loop, EmbeddingEngine):
            self._embedder = Embedder(loop, self.requests, self.workers, self.media)
        if (speech := self._speech) is not None:
            admission = Admission(config, resources.keys, speech.dispatcher, speech.engine.n_slots)
            requests = Requests(resources, speech.engine, speech.dispatcher, admission)
            #: Speaks texts, if there is a model that does.
            self.speaker = Speaker(
                speech.engine, requests, self.workers, speech.voices, speech.languages
            )
        if model.transcribes:
            transcriber = self._transcriber(config)
            self._transcriptions = Transcriptions(transcriber, self._loader, self.requests)

    def _transcriber(self, config: Config) -> Transcriber:
        if config.transcription_model is not None:
            settings = WhisperSettings(model=config.transcription_model, offline=config.offline)
            return WhisperTranscriber(settings, max_waiting=config.max_queue)
        assert self.loop.projector is not None  # it hears
        return ModelTranscriber(
            self.text,
            self.workers,
            self.model.defaults,
            template=self.model.info.chat_template or "",
            rate=self.loop.projector.audio_rate,
            instruction=config.transcription_prompt,
        )

    @asynccontextmanager
    async def embedder(self, context: RequestContext) -> AsyncIterator[Embedder]:
        """Give what computes embeddings, for a block. Raises as `EmbeddingsBeside.use`."""
        if self.model.pooling is not None:
            yield self._embedder
            return
        async with self._beside.use(context) as embedder:
            yield embedder

    async def run(self) -> None:
        """Run what the model does beside the requests of its engine, until cancelled."""
        if self.model.pooling is None:
            await self._beside.run()

    @property
    def slots(self) -> SlotFiles:
        """Saves and restores slots. Raises NotSupportedError if the model generates no text."""
        self.model.check_generates()
        return self._slots

    @property
    def transcriptions(self) -> Transcriptions:
        """Transcribes recordings. Raises NotSupportedError if no transcriber is available."""
        self.model.check_transcribes()
        return self._transcriptions

    async def close(self) -> None:
        """End all work of the event loop's threads and processes with the model."""
        with trio.CancelScope(shield=True):
            async with alongside(_log_delay):
                await self._loader.aclose()
                if self.model.transcribes:
                    await self._transcriptions.aclose()
                await self.workers.aclose()
                if self.model.pooling is None:
                    await self.text.compilers.until_idle()


async def _log_delay() -> None:
    """Log a slow end. It has no time limit: a thread would read memory that was freed."""
    await trio.sleep(_DELAY)
    _log.warning("the model is not freed yet: threads still work with it", seconds=_DELAY)
