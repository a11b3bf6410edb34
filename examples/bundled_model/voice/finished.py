"""The finished voice, run by llama.cpp and libmtmd, for the evaluation."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp as mtmd

from examples.bundled_model.senses import Quiet
from examples.bundled_model.voice.recordings import Samples

#: Has to live as long as the libraries.
QUIET = Quiet(lambda *_: None)
PCM = mtmd.MTMD_HELPER_GEN_AUDIO_OUTTYPE_PCM
#: A token that libmtmd ignores, for the voice samples none.
NO_TOKEN = -1
#: Frames of a text at most.
MOST = 1000


class Voice:
    """A speaker and its projector."""

    def __init__(self, model: Path, projector: Path, threads: int = 1) -> None:
        llama_cpp.llama_log_set(QUIET, None)
        mtmd.mtmd_log_set(QUIET, None)
        mtmd.mtmd_helper_log_set(QUIET, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        if self.model is None:
            raise SystemExit(f"llama.cpp cannot load {model}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.embeddings, settings.pooling_type = 2048, True, 0
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        ears = mtmd.mtmd_context_params_default()
        ears.use_gpu, ears.n_threads, ears.warmup = False, threads, False
        self.mtmd = mtmd.mtmd_init_from_file(str(projector).encode(), self.model, ears)
        if self.mtmd is None:
            raise SystemExit(f"libmtmd cannot load {projector}")
        self.helper = mtmd.mtmd_helper_gen_audio_init(self.context, self.mtmd)
        assert self.helper is not None

    def speak(self, text: str, seed: int = 0) -> Samples:
        """Return the samples of a text."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        data = text.encode()
        given = mtmd.mtmd_helper_gen_audio_inp(
            seq_id=0, prompt=data, prompt_len=len(data), seed=seed, out_type=PCM
        )
        if mtmd.mtmd_helper_gen_audio_set_input(self.helper, ctypes.byref(given)):
            raise ValueError("libmtmd cannot say this text")
        while left := mtmd.mtmd_helper_gen_audio_step_prompt(self.helper, 512):
            if left < 0:
                raise ValueError("llama.cpp cannot decode the text")
        state = llama_cpp.llama_get_embeddings_ith(self.context, -1)
        following, stop = ctypes.POINTER(ctypes.c_float)(), ctypes.c_bool(False)
        for _ in range(MOST):
            failed = mtmd.mtmd_helper_gen_audio_step_gen(
                self.helper, NO_TOKEN, state, ctypes.byref(following), ctypes.byref(stop)
            )
            if failed:
                raise ValueError("libmtmd cannot make a frame")
            if stop.value or not following:
                break
            state = following
        return self._output()

    def _output(self) -> Samples:
        rate, length, count = ctypes.c_int32(), ctypes.c_size_t(), ctypes.c_int64()
        data = ctypes.POINTER(ctypes.c_char)()
        failed = mtmd.mtmd_helper_gen_audio_get_output(
            self.helper,
            ctypes.byref(rate),
            ctypes.byref(data),
            ctypes.byref(length),
            ctypes.byref(count),
        )
        if failed:
            raise ValueError("libmtmd cannot make sound")
        return np.frombuffer(ctypes.string_at(data, length.value), np.float32)
