"""The rows that stand for tokens, read from the model's file.

Rows are added to one another before the model gets them, so it cannot be given tokens. llama.cpp
exports a function that copies the whole matrix, but with a name of C++ only, which hangs on the
compiler and is of no use on Windows; and the copy takes 600 MB for 152,000 tokens. A file says
where each row is, and ggml's public functions turn it into numbers, of whatever type it is.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from trioserve.engine.backend import Matrix
from trioserve.errors import ModelLoadError, OutputError
from trioserve.llama.library import ggml
from trioserve.models import gguf
from trioserve.types import TokenId

_NAME = b"token_embd.weight"
_F32 = 0

#: In a projector: a row for each code of a frame and for each of the model's, and what chooses one.
_CODES, _FIRST_CODES, _HEADS = (
    b"a.gen.code.%s.weight" % part for part in (b"embd", b"out_embd", b"head")
)
#: Bytes that are checked at once.
_PART = 2**20


class _Traits(ctypes.Structure):
    """ggml's ``ggml_type_traits``."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class TokenRows:
    """The rows of a model's tokens. Any thread may read them.

    Raises:
        ModelLoadError: the file has none, or they are not of the width, or of an unknown type.
    """

    def __init__(self, path: Path, width: int) -> None:
        self._width = width
        part, tensor, start = _find(path)
        if len(tensor.shape) != 2 or tensor.shape[0] != width:
            raise ModelLoadError(f"The tokens of {path} are not of its width, which is {width}.")
        #: There may be fewer than tokens in the vocabulary.
        self.count = tensor.shape[1]
        self._row_size, self._to_float = _reader(tensor.kind, width, path)
        self._file: IO[bytes] = part.open("rb")
        self._reading = threading.Lock()
        self._start = start + tensor.offset
        self._file.seek(0, 2)
        if self._start + self.count * self._row_size > self._file.tell():
            self.close()
            raise ModelLoadError(f"The model file {path} is cut short.")

    def __call__(self, tokens: Sequence[TokenId]) -> Matrix:
        """Return a row for each token.

        Raises:
            OutputError: one of them has none, or the file has changed.
        """
        rows = np.empty((len(tokens), self._width), np.float32)
        for row, token in zip(rows, tokens, strict=True):
            if not 0 <= token < self.count:
                raise OutputError(f"The model has no row for token {token}.")
            row[:] = self._row(token)
        return rows

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()

    def _row(self, token: TokenId) -> Matrix:
        with self._reading:
            self._file.seek(self._start + token * self._row_size)
            data = self._file.read(self._row_size)
        if len(data) < self._row_size:
            raise OutputError("The model's file has become shorter.")
        if self._to_float is None:
            return np.frombuffer(data, np.float32)
        row = np.empty(self._width, np.float32)
        self._to_float(data, row.ctypes.data, self._width)
        return row


def check_codes(projector: Path, width: int) -> None:
    """Check that each code of a frame has a row of finite numbers. libmtmd takes that for granted.

    Otherwise the process would end when such a code is chosen, which may be after hours.

    Raises:
        ModelLoadError: one has none.
    """
    with gguf.read(projector) as header:
        tensors = {one.name: one for one in header.tensors()}
        start = header.data_start()
    if not {_CODES, _HEADS} <= tensors.keys():
        return  # a family without codes
    (_, *sizes), (_, *chosen) = tensors[_CODES].shape, tensors[_HEADS].shape
    if len(sizes) != len(chosen) or any(size < n for size, n in zip(sizes, chosen, strict=True)):
        raise ModelLoadError(f"The projector {projector} lacks rows for some of its codes.")
    with projector.open("rb") as file:
        for tensor in (tensors[_CODES], tensors.get(_FIRST_CODES)):
            if tensor is not None:
                file.seek(start + tensor.offset)
                _check_numbers(file, tensor, width, projector)


def _check_numbers(file: IO[bytes], tensor: gguf.Tensor, width: int, path: Path) -> None:
    row_size, to_float = _reader(tensor.kind, width, path)
    n_rows = math.prod(tensor.shape[1:])
    step = max(1, _PART // row_size)
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        data = file.read(n * row_size)
        if to_float is None:
            numbers = np.frombuffer(data, np.float32)
        else:
            numbers = np.empty(n * width, np.float32)
            to_float(data.ljust(n * row_size), numbers.ctypes.data, n * width)
        if not np.isfinite(numbers).all():
            raise ModelLoadError(f"The projector {path} has rows for codes that are not finite.")


def _find(path: Path) -> tuple[Path, gguf.Tensor, int]:
    """Find the matrix in the files of a model, and where the data begin there."""
    for part in gguf.parts_of(path):
        with gguf.read(part) as header:
            tensor = next((one for one in header.tensors() if one.name == _NAME), None)
            if tensor is not None:
                return part, tensor, header.data_start()
    raise ModelLoadError(f"The model in {path} has no rows for tokens.")


def _reader(kind: int, width: int, path: Path) -> tuple[int, Any]:
    """Return the bytes of a row of a type, and what makes numbers of it; None: it has numbers."""
    functions: Any = ggml()
    get_traits = functions.ggml_get_type_traits
    get_traits.argtypes, get_traits.restype = [ctypes.c_int], ctypes.POINTER(_Traits)
    functions.ggml_type_size.argtypes = [ctypes.c_int]
    functions.ggml_type_size.restype = ctypes.c_size_t
    if kind == _F32:
        return 4 * width, None
    traits = get_traits(kind)[0]  # llama.cpp has loaded the file, so the type exists
    # The structure may be another one in another version.
    is_known = traits.to_float and traits.type_size == functions.ggml_type_size(kind)
    if not is_known or traits.blck_size < 1 or width % traits.blck_size:
        raise ModelLoadError(f"Rows of {path} are of a type that is not supported, {kind}.")
    return traits.type_size * (width // traits.blck_size), _ToFloat(traits.to_float)
