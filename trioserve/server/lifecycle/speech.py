"""Loads the model that speaks beside the one that generates text, and runs its engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
from trio_util import AsyncValue

from trioserve.concurrency import alongside
from trioserve.engine import Engine, SpeechEngine
from trioserve.engine.loop import EngineLoop
from trioserve.errors import EngineError, InvalidRequestError, ModelLoadError
from trioserve.server.dispatch import Dispatcher
from trioserve.server.generation.requests import ServerResources
from trioserve.server.lifecycle.engine import Driver, engine_of
from trioserve.server.speech.voices import Languages, Voices, voices_of


@attrs.frozen(eq=False)
class SpeechParts:
    """What a server needs to speak."""

    engine: SpeechEngine
    dispatcher: Dispatcher
    voices: Voices
    languages: Languages


@asynccontextmanager
async def speech_of(
    resources: ServerResources,
    text: EngineLoop,
    drive: Driver,
) -> AsyncIterator[SpeechParts | None]:
    """Run the engine of the model that speaks during a block; None: the server does not speak.

    Raises:
        ModelLoadError: the model, a voice or the language cannot be used.
        ConfigError: a recording of a voice cannot be read.
        BridgeError: no descriptors are left.
    """
    if not isinstance(text, Engine) or (load := text.load_speaker) is None:
        yield None
        return
    config = resources.config
    failure: AsyncValue[EngineError | None] = AsyncValue(None)  # its own: chats go on without it
    async with engine_of(config, load, SpeechEngine, drive, failure) as (engine, dispatcher):
        assert isinstance(engine, SpeechEngine)
        dispatcher.step = resources.step
        languages = Languages(tuple(engine.backend.languages), config.tts_lang or "")
        try:
            languages.name_of("", "tts_lang")
        except InvalidRequestError as error:
            raise ModelLoadError(error.message) from error
        async with alongside(dispatcher.run, dispatcher.watch):
            voices = await voices_of(config, engine.backend)
            yield SpeechParts(engine, dispatcher, voices, languages)
