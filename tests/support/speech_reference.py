"""Speech as llama.cpp's own helper makes it, which decodes one text at a time."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from trioserve.engine import SpeechEngine
from trioserve.engine.speaker import Samples
from trioserve.llama.library import lib
from trioserve.llama.media.library import load as load_mtmd
from trioserve.llama.sampler import LlamaSampler
from trioserve.llama.speech import parts
from trioserve.llama.speech.generator import SpeechGenerator
from trioserve.llama.speech.qwen import QwenUtterance
from trioserve.llama.speech.speaker import LlamaSpeaker
from trioserve.types import DecodedAudio, Failed, Sound, SpeechTask, Spoken


def seed_as_llama_cpp(patch: pytest.MonkeyPatch) -> None:
    """Have all frames of a task go on with the random numbers of its seed, as the helper does.

    The speakers of one projector cannot do so beside each other: they would share these numbers.
    """
    patch.setattr(parts, "frame_seed", lambda seed, _place: seed)
    patch.setattr(SpeechGenerator, "_reseed", lambda *_: None)


def forget_seed(speaker: LlamaSpeaker) -> None:
    """Have the random numbers begin anew with the next call, whatever its seed is."""
    generator = speaker._generator
    generator.frame(np.zeros(generator.width, np.float32), 12345)


def said(
    speaker: LlamaSpeaker, *tasks: SpeechTask, apart: int = 0
) -> dict[int, tuple[Samples, Spoken]]:
    """Have an engine say tasks, which come some steps `apart`.

    Returns the samples of each, and its end.
    """
    engine = SpeechEngine(speaker, lambda: None)
    for task in tasks:
        engine.check(task)
        engine.submit(task)
        for _ in range(apart):
            engine.step()
    while engine.step():
        pass
    sounds = {task.id: [np.empty(0, np.float32)] for task in tasks}
    ends: dict[int, Spoken] = {}
    for event in engine.take():
        if isinstance(event, Sound):
            sounds[event.task_id].append(event.samples)
        elif isinstance(event, Spoken):
            ends[event.task_id] = event
        elif isinstance(event, Failed):
            raise event.error
    return {id_: (np.concatenate(sounds[id_]), ends[id_]) for id_ in sounds}


class Helper:
    """libmtmd's ``mtmd_helper_gen_audio``, on the context and the projector of a speaker."""

    def __init__(self, speaker: LlamaSpeaker) -> None:
        self._speaker = speaker
        self._mtmd: Any = load_mtmd()
        with speaker._projector.in_use() as mtmd_context:
            self._handle = self._mtmd.mtmd_helper_gen_audio_init(
                speaker._context.handle, mtmd_context
            )

    def close(self) -> None:
        self._mtmd.mtmd_helper_gen_audio_free(self._handle)

    def say(
        self,
        text: str,
        seed: int,
        *,
        recording: DecodedAudio | None = None,
        language: str = "",
        max_frames: int = 10_000,
    ) -> Samples:
        """Say a text in the first sequence, which is empty before and after that."""
        speaker, mtmd = self._speaker, self._mtmd
        forget_seed(speaker)
        given, data = mtmd.mtmd_helper_gen_audio_inp(), text.encode()
        given.prompt, given.prompt_len, given.seed = data, len(data), seed
        given.lang = language.encode()
        given.out_type = mtmd.MTMD_HELPER_GEN_AUDIO_OUTTYPE_PCM
        if recording is not None:
            samples = np.frombuffer(recording.samples, np.float32)
            given.speaker_ref = mtmd.mtmd_bitmap_init_from_audio(
                len(samples), samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            )
        assert mtmd.mtmd_helper_gen_audio_set_input(self._handle, ctypes.byref(given)) == 0
        before = speaker._context.memory.last(0) + 1
        while (left := mtmd.mtmd_helper_gen_audio_step_prompt(self._handle, 512)) > 0:
            pass
        assert (before, left) == (0, 0)
        n_prompt = speaker._context.memory.last(0) + 1
        sampler = self._sampler(seed)
        self._frames(n_prompt, sampler, max_frames)
        if sampler is not None:
            sampler.close()
        if recording is not None:
            mtmd.mtmd_bitmap_free(given.speaker_ref)
        speaker.forget(0)
        return self._output()

    def _frames(self, n_prompt: int, sampler: LlamaSampler | None, max_frames: int) -> None:
        context, n_rows = self._speaker._context, n_prompt
        hidden = lib.llama_get_embeddings_ith(context.handle, -1)
        stop, after = ctypes.c_bool(), ctypes.POINTER(ctypes.c_float)()
        for _ in range(max_frames):
            context.rows = b"\1" * n_rows
            token = -1 if sampler is None else sampler.sample(n_rows - 1)
            code = self._mtmd.mtmd_helper_gen_audio_step_gen(
                self._handle, token, hidden, ctypes.byref(after), ctypes.byref(stop)
            )
            assert code == 0
            if stop.value or not after:
                return
            hidden, n_rows = after, 1

    def _sampler(self, seed: int) -> LlamaSampler | None:
        """Make the sampler that an utterance has; None: the family has none."""
        task = SpeechTask(id=0, pieces=[(1,)], seed=seed)
        utterance = self._speaker.utterance(task)
        if not isinstance(utterance, QwenUtterance):
            return None
        utterance.begin(0)
        sampler, utterance._sampler = utterance._sampler, None
        return sampler

    def _output(self) -> Samples:
        rate, data = ctypes.c_int32(), ctypes.POINTER(ctypes.c_char)()
        size, n_samples = ctypes.c_size_t(), ctypes.c_int64()
        code = self._mtmd.mtmd_helper_gen_audio_get_output(
            self._handle, *map(ctypes.byref, (rate, data, size, n_samples))
        )
        assert (code, rate.value) == (0, self._speaker.sample_rate)
        if not n_samples.value:
            return np.empty(0, np.float32)
        floats = ctypes.cast(data, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, shape=(n_samples.value,)).copy()
