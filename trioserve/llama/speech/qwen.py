"""Qwen3-TTS: the backbone chooses a code a frame, and a small model the other fifteen.

The rows of a text are sums: of what stands for its tokens, and of what stands for a silent code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic

import numpy as np

from trioserve.engine.backend import Matrix
from trioserve.engine.speaker import Samples, SpokenPrompt
from trioserve.errors import InvalidRequestError, ModelLoadError
from trioserve.llama.sampler import LlamaSampler
from trioserve.llama.speech.generator import Codes
from trioserve.llama.speech.parts import Parts, SpeechUtterance
from trioserve.types import SamplingParams, SpeechTask, TokenId

FRAME_RATE = 12.5

#: Frames that the decoder of sound takes at once; libmtmd fixes it. After fewer of them its state
#: is of no use, but the sound of these is what it will be: it hangs on nothing that comes later.
_WINDOW = 72
#: So the first frames of a task are heard before the rest of the window is there. Each time costs
#: as much as a whole window.
_FIRST_WINDOWS = (8, 24, _WINDOW)

#: As the model's makers have it.
_TEMPERATURE, _TOP_K, _TOP_P, _REPEAT_PENALTY = 0.9, 50, 1.0, 1.05

_ROLE = "<|im_start|>assistant\n"
_LANGUAGE = "<|codec_language_"
_CODES: Mapping[str, str] = {
    "zh": "chinese", "en": "english", "de": "german", "it": "italian", "pt": "portuguese",
    "es": "spanish", "ja": "japanese", "ko": "korean", "fr": "french", "ru": "russian",
}  # fmt: skip


class Qwen:
    """Texts as this family takes them."""

    def __init__(self, parts: Parts, *, n_ctx_seq: int, language: str) -> None:
        self.parts = parts
        # Four frames a token are usual, and six leave room for a slow speaker.
        self.max_piece = max(1, n_ctx_seq // 7)
        self.n_ctx_seq = n_ctx_seq
        tokens = {
            name: parts.tokens.get(name.encode(), -1)
            for name in (
                "<|codec_0|>", "<|codec_bos|>", "<|codec_eos_token|>", "<|codec_pad|>",
                "<|codec_think|>", "<|codec_think_bos|>", "<|codec_think_eos|>", "<tts_pad>",
                "<tts_text_bos>", "<tts_text_eod>",
            )
        }  # fmt: skip
        missing = [name for name, token in tokens.items() if token < 0]
        if missing:
            raise ModelLoadError(f"The vocabulary of {parts.path} lacks {', '.join(missing)}.")
        self.first_code, self.end = tokens["<|codec_0|>"], tokens["<|codec_eos_token|>"]
        self._languages = _languages(parts.tokens)
        if not self._languages:
            raise ModelLoadError(f"The vocabulary of {parts.path} has no language.")
        first = self.named(language or "english")
        if first is None and language:
            raise ModelLoadError(
                f"The model in {parts.path} does not speak {language!r}, but "
                f"{', '.join(self._languages)}."
            )
        ordered = sorted(self._languages, key=lambda name: name != first)
        self.languages: Sequence[str] = tuple(ordered)

        def row(name: str) -> Matrix:
            return parts.rows([tokens[name]])

        self.silence, self.pad = row("<|codec_pad|>"), row("<tts_pad>")
        role = parts.rows(parts.vocab.tokenize(_ROLE))
        think = row("<|codec_think|>"), row("<|codec_think_bos|>")
        self._before_language = np.concatenate([role, *(self.pad + one for one in think)])
        self._after_language = self.pad + row("<|codec_think_eos|>")
        self._before_text = row("<tts_text_bos>") + self.silence
        self._after_text = np.concatenate(
            [row("<tts_text_eod>") + self.silence, self.pad + row("<|codec_bos|>")]
        )

    def named(self, language: str) -> str | None:
        """Return the model's name of a language, which may be a code; None: it has none."""
        name = _CODES.get(language.lower(), language.lower())
        return name if name in self._languages else None

    def tokenize(self, text: str) -> tuple[TokenId, ...]:
        # Names of control tokens are text: one could end the turn.
        return self.parts.vocab.tokenize(text.strip(), parse_special=False)

    def n_prompt(self, task: SpeechTask) -> int:
        if task.language and self.named(task.language) is None:
            raise InvalidRequestError.at("language", f"must be one of {', '.join(self.languages)}.")
        n_voice = 0 if task.voice is None else len(task.voice.rows)
        around = self._before_language, self._after_language, self._before_text, self._after_text
        return sum(map(len, around)) + 1 + n_voice + max(map(len, task.pieces))

    def prompt(self, tokens: Sequence[TokenId], task: SpeechTask) -> SpokenPrompt:
        """Put the language and the voice before the text, and after it what begins the sound."""
        language = self.named(task.language) or self.languages[0]
        shared = [
            self._before_language,
            self.pad + self.parts.rows([self._languages[language]]),
            self._after_language,
        ]
        if task.voice is not None:
            shared.append(self.pad + task.voice.rows)
        shared.append(self._before_text)
        text = self.parts.rows(tokens) + self.silence
        rows = np.concatenate([*shared, text, self._after_text])
        return SpokenPrompt(rows, sum(map(len, shared)))

    def utterance(self, task: SpeechTask) -> QwenUtterance:
        return QwenUtterance(self, task)


def _languages(tokens: Mapping[bytes, TokenId]) -> dict[str, TokenId]:
    return {
        name.decode().removeprefix(_LANGUAGE).removesuffix("|>"): token
        for name, token in tokens.items()
        if name.startswith(_LANGUAGE.encode())
    }


class QwenUtterance(SpeechUtterance):
    """See `trioserve.engine.speaker.Utterance`."""

    def __init__(self, family: Qwen, task: SpeechTask) -> None:
        super().__init__(family.parts, task)
        self._family = family
        self._sampler: LlamaSampler | None = None
        #: Of the window; the first frames are sound already.
        self._codes: list[Codes] = []
        self._n_heard = 0
        self._windows: Sequence[int] = _FIRST_WINDOWS
        self._state = b""

    def begin(self, piece: int) -> SpokenPrompt:
        self.close()
        params = SamplingParams(
            seed=self.seed,
            temperature=_TEMPERATURE,
            top_k=self._task.top_k or _TOP_K,
            top_p=self._task.top_p or _TOP_P,
            min_p=0.0,
            repeat_penalty=_REPEAT_PENALTY,
            repeat_last_n=-1,
        )
        parts, n_ctx = self._parts, self._family.n_ctx_seq
        self._sampler = LlamaSampler(parts.context, parts.vocab, params, (), n_ctx=n_ctx)
        self._codes, self._n_heard, self._state = [], 0, b""
        return self._family.prompt(self._task.pieces[piece].tokens, self._task)

    def frame(self, row: int) -> Matrix | None:
        assert self._sampler is not None
        token = self._sampler.sample(row)
        if token == self._family.end or token in self._parts.vocab.end_of_generation:
            return None
        made = self._parts.generator.frame(
            self._parts.hidden(row),
            self.next_seed(),
            code=token - self._family.first_code,
            top_k=self._task.top_k,
            top_p=self._task.top_p,
        )
        self._codes.append(made.codes)
        # The text is in the prompt as a whole: nothing more of it comes with the frames.
        return made.row + self._family.pad

    @property
    def is_due(self) -> bool:
        return len(self._codes) >= self._windows[0]

    def sound(self) -> Samples:
        n_frames = len(self._codes)
        if n_frames == self._n_heard:
            return np.empty(0, np.float32)
        start = monotonic()
        samples, state = self._parts.generator.sound(np.concatenate(self._codes), self._state)
        seconds = monotonic() - start
        samples = samples[len(samples) // n_frames * self._n_heard :]
        self._windows = self._windows[1:] or (_WINDOW,)
        if seconds * FRAME_RATE > self._windows[0] - n_frames:
            self._windows = (_WINDOW,)  # it would take longer than it lasts
        if n_frames == _WINDOW:
            self._codes, self._n_heard, self._state = [], 0, state
        else:
            self._n_heard = n_frames
        return samples

    def close(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()
