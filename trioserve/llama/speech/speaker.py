"""LlamaSpeaker: a model that speaks, its projector and a context, for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unicodedata import combining, normalize

import attrs

from trioserve.config import Config
from trioserve.engine.speaker import Rows, SpeechBackend
from trioserve.errors import (
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    NotSupportedError,
)
from trioserve.llama.batch import RowsBatch
from trioserve.llama.context import Context, generation_params, thread_choices
from trioserve.llama.layout import Layout, cell_size, pad
from trioserve.llama.library import lib
from trioserve.llama.media.chunks import N_SECTIONS
from trioserve.llama.media.projector import LlamaProjector
from trioserve.llama.model import LlamaModel, Progress
from trioserve.llama.shape import read_shape
from trioserve.llama.speech.generator import FAMILIES, SpeechGenerator
from trioserve.llama.speech.parts import Parts
from trioserve.llama.speech.pocket import FRAME_RATE, Pocket, PocketUtterance
from trioserve.llama.speech.qwen import Qwen, QwenUtterance
from trioserve.llama.speech.token_rows import TokenRows, check_codes
from trioserve.llama.vocab import LlamaVocab
from trioserve.log import get_logger
from trioserve.models import resolve_projector
from trioserve.models.gguf import parts_of, total_size
from trioserve.models.speech import SpeechFiles
from trioserve.types import DecodedAudio, SpeechTask, TokenId, Voice

_log = get_logger("llama")

#: Cells of a sequence, if the configuration does not say: 80 seconds of sound.
_N_CTX_SEQ = 1024
#: Bytes for the logits of a batch. llama.cpp makes room for those of all its rows, because each has
#: a hidden state.
_LOGITS = 64 * 2**20
_MAX_BATCH = 512
#: Characters that an error names.
_MAX_SHOWN = 5
#: Marks of print, and what stands for them in vocabularies without them.
_ASCII = str.maketrans("‘’“”–—", "''\"\"--")  # noqa: RUF001 - these are the marks
#: llama.cpp's kinds of positions with sections: MROPE and IMROPE.
_MROPE = (8, 40)


#: Settings that apply to a model that speaks, too.
_SHARED = (
    "parallel", "threads", "threads_batch", "flash_attn", "n_gpu_layers", "load_mode",
    "check_tensors", "trial_load", "device", "split_mode", "main_gpu", "kv_offload", "op_offload",
    "repack", "no_host", "numa", "mmproj_offload", "mmproj_device", "tts_lang",
)  # fmt: skip


def speech_config(config: Config, files: SpeechFiles) -> Config:
    """Make the configuration of a model that speaks, beside the model of `config`."""
    shared: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    model, projector = str(files.model), str(files.projector)
    return Config(model=model, mmproj=projector, tts=model, fit="off", **shared)


class LlamaSpeaker(SpeechBackend):
    """Implements `trioserve.engine.speaker.SpeechBackend` with llama.cpp.

    It may be made in one thread, used in another and closed in a third.
    """

    def __init__(
        self, model: LlamaModel, context: Context, projector: LlamaProjector, config: Config
    ) -> None:
        generator = SpeechGenerator(projector)
        path = Path(model.info.path)
        if generator.family != model.arch:
            raise ModelLoadError(
                f"The projector {projector.path} is of the kind {generator.family}, and the model "
                f"in {path} of the kind {model.arch}."
            )
        self._model, self._context, self._files = model, context, ExitStack()
        self._projector, self._generator = projector, generator
        self.info = model.info
        self.vocab: LlamaVocab = model.vocab
        self.n_slots = self.n_seqs = context.n_seqs
        self.n_ctx, self.n_ctx_seq, self.n_batch = context.n_ctx, context.n_ctx_seq, context.n_batch
        self.thread_choices = thread_choices(config)
        self.sample_rate, self.frame_rate = generator.sample_rate, FRAME_RATE
        self.takes_voices, self.voice_rate = projector.hears, projector.audio_rate
        self._sections = N_SECTIONS if lib.llama_model_rope_type(model.handle) in _MROPE else 1
        rows = self._files.enter_context(closing(TokenRows(path, generator.width)))
        parts = Parts(path, model.vocab, context, generator, rows)
        self._rows = rows
        self._family: Pocket | Qwen
        with ExitStack() as made:
            made.callback(self._files.close)
            if generator.family == "pockettts":
                self._family = Pocket(parts)
            else:
                language = config.tts_lang or ""
                self._family = Qwen(parts, n_ctx_seq=self.n_ctx_seq, language=language)
            made.pop_all()
        self.languages, self.max_piece = self._family.languages, self._family.max_piece
        if config.tts_lang and not self.languages:
            _log.info("the model speaks one language", left_out="tts_lang")
        _log.info(
            "speech",
            family=generator.family,
            variant=generator.variant or None,
            languages=",".join(self.languages) or None,
            slots=self.n_slots,
            longest=self.n_ctx_seq,
        )

    @classmethod
    def load(cls, config: Config, *, progress: Progress | None = None) -> LlamaSpeaker:
        """Load what `speech_config` has made; see `trioserve.llama.load_speaker`."""
        with ExitStack() as made:  # it is closed where the rest fails
            model = made.enter_context(LlamaModel.load(config, progress=progress))
            if model.arch not in FAMILIES.values():
                raise ModelLoadError(f"The model in {model.info.path} does not speak.")
            path = resolve_projector(config)
            assert path is not None
            projector = LlamaProjector.load(path, model, config)
            made.callback(projector.close)
            context = made.enter_context(Context(model, speech_params(model, config)))
            speaker = cls(model, context, projector, config)
            made.pop_all()
        return speaker

    @property
    def beyond_interface(self) -> tuple[str, ...]:
        """As `LlamaBackend.beyond_interface`."""
        return ("encoder_threads",) if self._projector.can_set_threads else ()

    @property
    def file_names(self) -> tuple[str, str]:
        """The files, for errors."""
        return f"the model file {self.info.path}", f"the projector {self._projector.path}"

    def check_codes(self) -> None:
        """Check the rows of the projector's codes; see `token_rows.check_codes`."""
        check_codes(self._projector.path, self._generator.width)

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from the next batch on."""
        self._context.set_threads(count)
        self._projector.set_threads(count)

    def tokenize(self, text: str) -> tuple[TokenId, ...]:
        """Make a piece of a task of a text, as `SpeechBackend` has it."""
        tokens = self._family.tokenize(text)
        if self.vocab.unknown.isdisjoint(tokens):
            return tokens
        missing = [one for one in dict.fromkeys(text) if self._lacks(one)]
        instead = {ord(one): self._plainer(one) for one in missing}
        if letters := [one for one in missing if not instead[ord(one)]]:
            shown = ", ".join(map(repr, letters[:_MAX_SHOWN]))
            problem = f"has characters that the model cannot say: {shown}."
            raise InvalidRequestError.at("input", problem)
        return self._family.tokenize(text.translate(instead))

    def _lacks(self, text: str) -> bool:
        return not self.vocab.unknown.isdisjoint(self.vocab.tokenize(text))

    def _plainer(self, character: str) -> str:
        """Find what to say for a character: one without its accent, a blank for a symbol."""
        parts = normalize("NFKD", character.translate(_ASCII))
        plain = "".join(one for one in parts if not combining(one))
        if plain and not self._lacks(plain):
            return plain
        return "" if character.isalnum() else " "

    def take_voice(self, recording: DecodedAudio) -> Voice:
        """Take the voice of a recording, as `SpeechBackend` has it."""
        if not self.takes_voices:
            raise NotSupportedError("The model takes no voice from a recording.")
        return Voice(self._generator.voice(recording))

    def n_prompt(self, task: SpeechTask) -> int:
        """Count the rows of the longest prompt of a task, as `SpeechBackend` has it."""
        task.prompt.check(self._rows.count, task.param)
        if task.voice is not None and task.voice.rows.shape[1] != self._generator.width:
            raise InvalidRequestError.at("voice", "was taken by another model.")
        return self._family.n_prompt(task)

    def utterance(self, task: SpeechTask) -> PocketUtterance | QwenUtterance:
        """Make what says a task."""
        return self._family.utterance(task)

    def decode(self, batch: Sequence[Rows]) -> list[int]:
        """Compute rows, as `SpeechBackend` has it. Raises also EngineError: they do not fit."""
        rows = RowsBatch(batch, n_sections=self._sections, n_seqs=self.n_seqs)
        if len(rows) > self.n_batch:  # llama.cpp would end the process
            raise EngineError(f"A batch holds {self.n_batch} rows, not {len(rows)}.")
        self._context.decode(rows)
        return rows.last_rows

    def forget(self, seq: int, start: int = 0) -> None:
        """Remove the positions of a sequence from `start` on."""
        self._context.memory.remove(seq, start)

    def interrupt(self) -> None:
        """Interrupt the running batch. Call it from any thread."""
        self._context.interrupt()

    def interrupt_sound(self) -> None:
        """Interrupt the sound that is made. Call it from any thread."""
        self._generator.interrupt_sound()

    def close(self) -> None:
        """Free the projector, the context and the model, in this order. Closing twice is fine."""
        self._projector.close()
        self._files.close()
        self._context.close()
        self._model.close()


def size_of(files: SpeechFiles, config: Config) -> int:
    """Add up the bytes of a model that speaks and of its context, by the headers of its files."""
    size = total_size((*parts_of(files.model), files.projector))
    if (shape := read_shape(files.model)) is None:
        return size  # loading it says why
    n_cells = config.parallel * _n_part(shape.n_ctx_train)
    return size + _LOGITS + int(n_cells * cell_size(shape.layers, "f16", "f16"))


def _n_part(n_ctx_train: int) -> int:
    return min(_N_CTX_SEQ, pad(n_ctx_train))


def speech_params(model: LlamaModel, config: Config) -> Any:
    """Make the parameters of a context with a part of the cache for each slot.

    Raises:
        ModelLoadError: the KV cache would be larger than the memory that is free.
    """
    n_slots, n_part = config.parallel, _n_part(model.info.n_ctx_train)
    size = max(n_slots, min(_MAX_BATCH, _LOGITS // (4 * model.vocab.n_tokens), n_slots * n_part))
    layout = Layout(
        unified=False, is_elastic=False, n_seqs=n_slots, n_ctx=n_slots * n_part, n_part=n_part
    )
    own = attrs.evolve(config, batch_size=size, ubatch_size=size)
    params = generation_params(model, own, layout, n_scores=0)
    params.embeddings = True
    params.n_batch = params.n_ubatch = params.n_outputs_max = max(size, params.n_batch)
    return params
