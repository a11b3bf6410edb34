"""Models for any vocabulary: takes a vocabulary from a GGUF file and puts random weights behind it.

llama.cpp's sources come with the vocabularies of many models, as GGUF files without weights
(`models/ggml-vocab-*.gguf`). `LLAMA_CPP_SDIST` names the folder of the sources, as the sdist of
llama-cpp-python holds them. `make test-vocabularies` gets them and runs the tests that need them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np

_FOLDER = os.environ.get("LLAMA_CPP_SDIST", "")

_ALIGNMENT = 32
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_WIDTH, _HEADS, _FFN = 32, 2, 64


@cache
def vocabulary_files() -> dict[str, Path]:
    """Return the vocabularies of llama.cpp's sources by name; empty without the sources."""
    found = sorted(Path(_FOLDER).rglob("ggml-vocab-*.gguf")) if _FOLDER else []
    return {path.stem.removeprefix("ggml-vocab-"): path for path in found}


@cache
def chat_templates() -> dict[str, Path]:
    """Return the chat templates of llama.cpp's sources by name; empty without the sources."""
    found = sorted(Path(_FOLDER).rglob("models/templates/*.jinja")) if _FOLDER else []
    return {path.stem: path for path in found}


def expected_tokens(vocabulary: Path) -> list[tuple[str, list[int]]]:
    """Return texts and the tokens that llama.cpp's own tests expect; nothing if it has none."""
    texts = vocabulary.with_name(f"{vocabulary.name}.inp")
    tokens = vocabulary.with_name(f"{vocabulary.name}.out")
    if not texts.exists():
        return []
    pairs = zip(
        texts.read_bytes().decode().split("\n__ggml_vocab_test__\n"),
        tokens.read_text(encoding="utf-8").splitlines(),
        strict=False,  # nothing follows the last mark
    )
    return [(text, [int(token) for token in line.split()]) for text, line in pairs]


@attrs.frozen
class _Header:
    """The metadata of a GGUF file, each entry as the bytes that the file has for it."""

    entries: Mapping[str, bytes]

    def text(self, key: str) -> str:
        """Return a text; empty if it is missing."""
        data = self.entries.get(key, b"")
        start = 8 + len(key.encode()) + 4 + 8
        return data[start:].decode()

    def n_items(self, key: str) -> int:
        """Return the length of a list."""
        return int(struct.unpack_from("<Q", self.entries[key], 8 + len(key.encode()) + 8)[0])


def _read_header(data: bytes) -> _Header:
    n_entries = struct.unpack_from("<Q", data, 16)[0]
    entries, place = {}, 24
    for _ in range(n_entries):
        start = place
        size = struct.unpack_from("<Q", data, place)[0]
        key = data[place + 8 : place + 8 + size].decode()
        kind = struct.unpack_from("<I", data, place + 8 + size)[0]
        place = _after(data, place + 12 + size, kind)
        entries[key] = data[start:place]
    return _Header(entries)


def _after(data: bytes, place: int, kind: int) -> int:
    """Return where a value ends."""
    if kind == _STRING:
        return place + 8 + int(struct.unpack_from("<Q", data, place)[0])
    if kind != _ARRAY:
        return place + _SIZES[kind]
    kind, count = struct.unpack_from("<IQ", data, place)
    place += 12
    if kind in _SIZES:
        return place + _SIZES[kind] * count
    for _ in range(count):
        place = _after(data, place, kind)
    return place


def _entry(key: str, value: Any) -> bytes:
    name = key.encode()
    match value:
        case bool():
            kind, data = _BOOL, struct.pack("<?", value)
        case int():
            kind, data = _U32, struct.pack("<I", value)
        case float():
            kind, data = _F32, struct.pack("<f", value)
        case _:
            text = str(value).encode()
            kind, data = _STRING, struct.pack("<Q", len(text)) + text
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + data


def write_model(
    vocabulary: Path, path: Path, *, seed: int = 0, context: int = 2048, **metadata: Any
) -> Path:
    """Write a model with a vocabulary: a BERT for that of a BERT, else a Llama.

    Args:
        vocabulary: a GGUF file, with or without weights.
        path: where to write the model.
        seed: of the weights.
        context: the length of the longest text.
        metadata: other values for keys of the tokenizer, without `tokenizer.ggml.`; None removes
            the key.
    """
    header = _read_header(vocabulary.read_bytes())
    is_encoder = header.text("general.architecture").endswith(("bert", "bert-moe"))
    arch = "bert" if is_encoder else "llama"
    kept = {k: v for k, v in header.entries.items() if k.startswith("tokenizer.")}
    if "general.name" in header.entries:  # llama.cpp goes by it with Phi-3
        kept["general.name"] = header.entries["general.name"]
    kept["general.architecture"] = _entry("general.architecture", arch)
    for key, value in _shape(arch, context).items():
        kept[f"{arch}.{key}"] = _entry(f"{arch}.{key}", value)
    if is_encoder:
        kept["tokenizer.ggml.token_type_count"] = _entry("tokenizer.ggml.token_type_count", 2)
    for key, value in metadata.items():
        name = f"tokenizer.ggml.{key}"
        kept.pop(name, None)
        if value is not None:
            kept[name] = _entry(name, value)
    n_vocab = header.n_items("tokenizer.ggml.tokens")
    rng = np.random.default_rng(seed)
    tensors = dict(_bert(rng, n_vocab, context) if is_encoder else _llama(rng, n_vocab))
    _write(path, kept, tensors)
    return path


def _shape(arch: str, context: int) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "context_length": context,
        "embedding_length": _WIDTH,
        "block_count": 1,
        "feed_forward_length": _FFN,
        "attention.head_count": _HEADS,
    }
    if arch == "bert":
        pooling = int(gguf.PoolingType.MEAN)
        return {
            **shape,
            "attention.layer_norm_epsilon": 1e-6,
            "attention.causal": False,
            "pooling_type": pooling,
        }
    return {**shape, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 16}


_Tensors = Iterator[tuple[str, np.ndarray[Any, Any]]]


def _llama(rng: np.random.Generator, n_vocab: int) -> _Tensors:
    yield "token_embd.weight", _matrix(rng, n_vocab, _WIDTH).astype(np.float16)
    # The logits have a deviation of about 3, as those of a trained model.
    yield "output_norm.weight", np.full(_WIDTH, 3, np.float32)
    for name, rows, columns in (
        ("attn_q", _WIDTH, _WIDTH),
        ("attn_k", _WIDTH, _WIDTH),
        ("attn_v", _WIDTH, _WIDTH),
        ("attn_output", _WIDTH, _WIDTH),
        ("ffn_gate", _FFN, _WIDTH),
        ("ffn_up", _FFN, _WIDTH),
        ("ffn_down", _WIDTH, _FFN),
    ):
        yield f"blk.0.{name}.weight", _matrix(rng, rows, columns)
    for name in ("attn_norm", "ffn_norm"):
        yield f"blk.0.{name}.weight", np.ones(_WIDTH, np.float32)


def _bert(rng: np.random.Generator, n_vocab: int, context: int) -> _Tensors:
    yield "token_embd.weight", _matrix(rng, n_vocab, _WIDTH).astype(np.float16)
    yield "token_types.weight", _matrix(rng, 2, _WIDTH)
    yield "position_embd.weight", _matrix(rng, context, _WIDTH)
    for name, rows, columns in (
        ("attn_q", _WIDTH, _WIDTH),
        ("attn_k", _WIDTH, _WIDTH),
        ("attn_v", _WIDTH, _WIDTH),
        ("attn_output", _WIDTH, _WIDTH),
        ("ffn_up", _FFN, _WIDTH),
        ("ffn_down", _WIDTH, _FFN),
    ):
        yield f"blk.0.{name}.weight", _matrix(rng, rows, columns)
        yield f"blk.0.{name}.bias", np.zeros(rows, np.float32)
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        yield f"{name}.weight", np.ones(_WIDTH, np.float32)
        yield f"{name}.bias", np.zeros(_WIDTH, np.float32)


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)


def _write(
    path: Path, entries: Mapping[str, bytes], tensors: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    infos, place = [], 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        kind = int(gguf.GGMLQuantizationType.F16 if tensor.dtype == np.float16 else 0)
        encoded = name.encode()
        infos.append(
            struct.pack("<Q", len(encoded))
            + encoded
            + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, place)
        )
        place += _padded(tensor.nbytes)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)))
        file.writelines(entries.values())
        file.writelines(infos)
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for tensor in tensors.values():
            file.write(tensor.tobytes())
            file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
