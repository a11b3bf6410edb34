"""The finished model with its eyes and ears, run by llama.cpp and libmtmd, for the evaluation."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import mtmd_cpp as mtmd

from examples.bundled_model.chat import render
from examples.bundled_model.media import BUNDLED, MARK

#: A picture is (height, width, 3) of bytes; a recording is samples at 16,000 a second.
Media = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
Quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class Senses:
    """The language model and its projector."""

    def __init__(
        self, projector: Path, model: Path = BUNDLED, threads: int = 1, *, thinking: bool = False
    ) -> None:
        self.thinking = thinking
        self.quiet = Quiet(lambda *_: None)
        mtmd.mtmd_log_set(self.quiet, None)
        mtmd.mtmd_helper_log_set(self.quiet, None)
        self.llama = llama_cpp.Llama(
            str(model), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.context = self.llama._ctx.ctx
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.warmup = False, threads, False
        loaded = mtmd.mtmd_init_from_file(str(projector).encode(), self.llama._model.model, params)
        if loaded is None:
            raise SystemExit(f"libmtmd cannot load {projector}")
        self.mtmd = loaded
        self.end = self.llama.token_eos()

    def _chunks(self, text: str, media: Media) -> mtmd.mtmd_input_chunks_p:
        data = np.ascontiguousarray(media)
        if data.dtype == np.uint8:
            pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = mtmd.mtmd_bitmap_init(data.shape[1], data.shape[0], pointer)
        else:
            pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            bitmap = mtmd.mtmd_bitmap_init_from_audio(len(data), pointer)
        marked = text.replace(MARK, mtmd.mtmd_default_marker().decode()).encode()
        given = mtmd.mtmd_input_text(marked, len(marked), False, True)
        chunks = mtmd.mtmd_input_chunks_init()
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        failed = mtmd.mtmd_tokenize(self.mtmd, chunks, ctypes.byref(given), bitmaps, 1)
        mtmd.mtmd_bitmap_free(bitmap)
        if failed:
            raise ValueError("libmtmd cannot use this picture or recording")
        return chunks

    def embeddings(self, media: Media, text_width: int = 192) -> npt.NDArray[np.float32]:
        """Return what the language model is shown, by token."""
        chunks = self._chunks(MARK, media)
        shown = []
        for index in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, index)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                continue
            if mtmd.mtmd_encode_chunk(self.mtmd, chunk):
                raise ValueError("libmtmd cannot encode this picture or recording")
            count = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            output = mtmd.mtmd_get_output_embd(self.mtmd)
            shown.append(np.ctypeslib.as_array(output, (count, text_width)).copy())
        mtmd.mtmd_input_chunks_free(chunks)
        return np.concatenate(shown)

    def ask(self, question: str, media: Media, limit: int = 64) -> str:
        """Ask a question that holds ``MARK``, greedily, and return the answer without thoughts."""
        messages = [{"role": "user", "content": question}]
        prompt = render(messages, prompt=True, thinking=self.thinking)
        chunks = self._chunks(prompt, media)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        place = llama_cpp.llama_pos(0)
        failed = mtmd.mtmd_helper_eval_chunks(
            self.mtmd, self.context, chunks, 0, 0, 512, True, ctypes.byref(place)
        )
        mtmd.mtmd_input_chunks_free(chunks)
        if failed:
            raise ValueError("libmtmd cannot evaluate this picture or recording")
        vocabulary = self.llama.n_vocab()
        made: list[int] = []
        while len(made) < limit:
            scores = llama_cpp.llama_get_logits_ith(self.context, -1)
            token = int(np.ctypeslib.as_array(scores, (vocabulary,)).argmax())
            if token == self.end:
                break
            made.append(token)
            one = (llama_cpp.llama_token * 1)(token)
            if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(one, 1)):
                raise ValueError("llama.cpp cannot decode the token")
        said = self.llama.detokenize(made, special=True).decode(errors="replace")
        return said.rpartition("</think>")[2].strip()
