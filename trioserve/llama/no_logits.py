"""Leaves out the logits of a context that makes embeddings.

llama.cpp computes logits for every token of a batch, though only its embedding is read: with a
vocabulary of 152,000 tokens that takes most of the time of a small model. Nothing turns them off,
so the node of the graph that makes them becomes one that does nothing, before it is computed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from trioserve.llama.library import ggml, lib

#: Place of the operation in `ggml_tensor`: after the type, the buffer, four sizes and four strides.
_OP_OFFSET = 80


def install(params: Any) -> None:
    """Have contexts made with these parameters leave out the logits, where ggml is as expected."""
    functions = ggml()
    if hasattr(functions, "ggml_op_desc") and hasattr(functions, "ggml_get_name"):
        params.cb_eval = _callback()


_has_left_out = False


def is_used() -> bool:
    """Return True once logits were left out in this process."""
    return _has_left_out


@cache  # llama.cpp calls it as long as there is a context
def _callback() -> Any:
    name_of, op_of = ggml().ggml_get_name, ggml().ggml_op_desc
    for function in (name_of, op_of):
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p

    def before_node(tensor: int, is_question: bool, _data: object) -> bool:
        global _has_left_out
        # Another last node, as a scaled or adapted one, is computed as usual.
        if is_question and name_of(tensor) == b"result_output" and op_of(tensor) == b"MUL_MAT":
            op = ctypes.c_int32.from_address(tensor + _OP_OFFSET)
            given = op.value
            op.value = 0
            _has_left_out = op_of(tensor) == b"NONE"
            if not _has_left_out:  # another layout of the structure
                op.value = given
        return False

    return lib.ggml_backend_sched_eval_callback(before_node)
