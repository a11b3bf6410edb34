"""The voices and the languages of a model that speaks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import attrs
import trio

from trioserve.config import Config
from trioserve.engine import SpeechBackend
from trioserve.errors import InvalidRequestError, ModelLoadError, TrioServeError
from trioserve.left_out import leave_out
from trioserve.server.speech.recordings import DEFAULT_VOICE, read_recordings
from trioserve.types import Voice

#: The voices that OpenAI has. Its clients name one of them, and get the default voice.
# fmt: off
OF_OPENAI = frozenset({
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage",
    "shimmer", "verse",
})
# fmt: on

#: The sample rate of recordings for a model that takes none, in Hz.
_RATE = 16_000

#: The names that models have for languages, by their codes.
_LANGUAGES: Mapping[str, str] = {
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "ja": "japanese",
    "ko": "korean",
    "pt": "portuguese",
    "ru": "russian",
    "zh": "chinese",
}
_CODES = {name: code for code, name in _LANGUAGES.items()}


@attrs.frozen
class Languages:
    """The languages of a model, by the names that it has for them; none: it has only one."""

    _names: tuple[str, ...]
    _default: str = ""  # of requests that name none

    def name_of(self, language: str, param: str = "language") -> str:
        """Find the model's name of a language, given as a code or a name.

        Raises:
            InvalidRequestError: the model does not speak it; names `param`.
        """
        asked = (language or self._default).lower()
        if not asked:
            return ""
        if not self._names:
            leave_out(param, "the model speaks one language, or finds out by itself")
            return ""
        for name in (asked, _LANGUAGES.get(asked.partition("-")[0], "")):
            if name in self._names:
                return name
        known = ", ".join(sorted(_CODES.get(each, each) for each in self._names))
        raise InvalidRequestError.at(param, f"is not spoken by this model; it speaks {known}.")

    def code_of(self, language: str) -> str:
        """Guess the code of a language, given as a code or a name; empty: not known."""
        asked = (language or self._default).lower()
        return _CODES.get(asked, asked.partition("-")[0])


def check_voice(name: str, voices: Collection[str], param: str = "voice") -> str:
    """Return the voice that a name stands for: one that OpenAI has is the default voice.

    Raises:
        InvalidRequestError: there is none of this name; names `param`.
    """
    if name in voices:
        return name
    if name in OF_OPENAI:
        leave_out(f"{param} {name}", f"no recording has this name; {DEFAULT_VOICE} speaks")
        return DEFAULT_VOICE
    known = ", ".join(sorted(voices))
    raise InvalidRequestError.at(param, f"is not known; the voices are: {known}.")


class Voices(dict[str, Voice | None]):
    """Voices by name. None is the model's own, which is the default unless a file has another."""

    def find(self, name: str) -> Voice | None:
        """Find a voice.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        return self[check_voice(name, self)]


async def voices_of(config: Config, backend: SpeechBackend) -> Voices:
    """Take the voices of the configured recordings.

    Raises:
        ModelLoadError: the model takes no voices, or not this one.
        TrioServeError: as `read_recordings`.
    """
    voices = Voices({DEFAULT_VOICE: None})
    for name, recording in (await read_recordings(config, backend.voice_rate or _RATE)).items():
        try:
            take = partial(backend.take_voice, recording)
            voices[name] = await trio.to_thread.run_sync(take)
        except TrioServeError as error:
            raise ModelLoadError(f"The voice {name} cannot be used: {error.message}") from error
    return voices
