"""The part of a projector that makes frames of hidden states, and sound of frames.

libmtmd keeps nothing from one call to the next but its random numbers, which it seeds when a call
names another seed than the one before. So several speakers share it: each keeps the state of its
sound, and no two frames have the same seed.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.engine.backend import Matrix
from trioserve.engine.speaker import Samples
from trioserve.errors import (
    DecodeInterruptedError,
    EncodeInterruptedError,
    InvalidMediaError,
    ModelLoadError,
    OutputError,
    ServerClosingError,
)
from trioserve.llama import library
from trioserve.llama.media.projector import LlamaProjector
from trioserve.types import DecodedAudio

#: The families, by libmtmd's numbers of them.
FAMILIES = {1: "qwen3tts", 2: "pockettts"}

_GEN_CODE, _GEN_WAV = 0, 1
#: The seed that stands for a random one.
RANDOM_SEED = 2**32 - 1

#: Seconds of the shortest recording of a voice. libmtmd ends the process where one is shorter than
#: its filters are wide; one of this length is tried out.
MIN_SECONDS = 1.0

Codes = NDArray[np.int32]


@attrs.frozen(eq=False)
class Frame:
    """A frame of sound, as the model has it."""

    codes: Codes  # or, in the family without codes,
    features: NDArray[np.float32]
    row: Matrix  # for the model's next input, shape (1, width)
    is_end: bool  # the model says that the text ends here


class SpeechGenerator:
    """The functions of libmtmd for speech, for one projector, which it closes.

    From any thread; one call at a time runs.

    Raises:
        ModelLoadError: the projector makes no speech.
    """

    def __init__(self, projector: LlamaProjector) -> None:
        self._projector, self._mtmd = projector, projector.mtmd
        self._turn = threading.Lock()
        self._is_sounding = False
        self._seed: int | None = None  # of the last call
        with projector.in_use() as context:
            info = self._mtmd.mtmd_gen_audio_get_info(context)
            self._default = self._mtmd.mtmd_gen_inp_default(context)
        if info.type not in FAMILIES:
            raise ModelLoadError(f"The projector {projector.path} makes no speech.")
        self.family = FAMILIES[info.type]
        self.sample_rate: int = info.sample_rate
        self.variant = (info.model_variant or b"").decode(errors="replace")
        self.width = projector.width

    def frame(
        self,
        hidden: NDArray[np.float32],
        seed: int,
        *,
        code: int = 0,
        top_k: int = 0,
        top_p: float = 0.0,
        temperature: float = 0.0,
    ) -> Frame:
        """Make a frame of a hidden state. Of 0, the last three are as the model's makers have them.

        Raises OutputError: it comes to nothing.
        """
        given = self._input(_GEN_CODE)
        given.embd, given.code0 = _pointer(hidden, ctypes.c_float), code
        given.top_k, given.top_p = top_k or given.top_k, top_p or given.top_p
        given.temp = temperature or given.temp
        with self._turn, self._projector.in_use() as context:
            if seed == self._seed:
                self._reseed(context, given, seed)
            given.seed = self._seed = seed
            made = self._call(context, given)
            return Frame(
                _copy(made.codes, made.n_codes, np.int32),
                _copy(made.feats, made.n_feats, np.float32),
                _copy(made.embd, self.width, np.float32)[np.newaxis],
                bool(made.is_eos),
            )

    def sound(self, codes: Codes | Samples, state: bytes) -> tuple[Samples, bytes]:
        """Turn the codes or the features of some frames into sound, after a state; at first none.

        Returns the samples, and the state after them.

        Raises:
            DecodeInterruptedError: `interrupt_sound` was called.
            OutputError: it comes to nothing.
        """
        given = self._input(_GEN_WAV)
        if codes.dtype == np.int32:
            given.codes, given.n_codes = _pointer(codes, ctypes.c_int32), codes.size
        else:
            given.feats, given.n_feats = _pointer(codes, ctypes.c_float), codes.size
        if state:
            given.state_data = ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_char))
            given.state_size = len(state)
        with self._turn:
            given.seed = RANDOM_SEED if self._seed is None else self._seed
            self._is_sounding = True
            try:
                with self._projector.interruptible() as context:
                    made = self._call(context, given)
                    samples = _copy(made.audio, made.n_samples, np.float32)
                    after = ctypes.string_at(made.state_data, made.state_size)
            except EncodeInterruptedError as error:
                raise DecodeInterruptedError(error.message) from error
            finally:
                self._is_sounding = False
        if not np.isfinite(samples).all():
            raise OutputError("The model made sound of numbers that are not finite.")
        return samples, after

    def voice(self, recording: DecodedAudio) -> Matrix:
        """Make the rows of a recording's voice.

        Raises:
            InvalidMediaError: it is too short, or has another rate.
            EncodeError: it failed.
        """
        if recording.seconds < MIN_SECONDS:
            raise InvalidMediaError(
                f"The recording of a voice must last at least {MIN_SECONDS:g} s, not "
                f"{recording.seconds:.2g}."
            )
        prepared = self._projector.prepare([recording], add_special=False)
        chunk = prepared.media[0][1]  # as libmtmd takes the first, if there are several
        while True:
            try:
                with self._turn:
                    return self._projector.encode(chunk)
            except EncodeInterruptedError:  # it was meant for a sound that had just ended
                if self._projector.is_closed:
                    raise ServerClosingError("The model is closed") from None

    def interrupt_sound(self) -> None:
        """End the `sound` that runs within milliseconds; without one, nothing. From any thread."""
        if self._is_sounding:
            self._projector.interrupt()

    def _reseed(self, context: Any, given: Any, seed: int) -> None:
        """Restart the random numbers of a seed that another speaker has just used."""
        given.seed = seed ^ 1
        self._call(context, given)

    def _input(self, kind: int) -> Any:
        given = type(self._default).from_buffer_copy(self._default)
        given.type = kind
        return given

    def _call(self, context: Any, given: Any) -> Any:
        library.take_errors()
        made = self._mtmd.mtmd_gen_out()
        code = self._mtmd.mtmd_gen_audio_process(context, ctypes.byref(given), ctypes.byref(made))
        if code != 0:
            why = library.reason(library.take_errors())
            raise OutputError(f"The model makes no sound of this: {why}.")
        return made


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def _copy(pointer: Any, size: int, kind: Any) -> NDArray[Any]:
    if not size:
        return np.empty(0, kind)
    return np.array(np.ctypeslib.as_array(pointer, shape=(size,)), dtype=kind)
