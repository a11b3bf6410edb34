"""Writes small GGUF files with random weights, for tests of embeddings and of ranking.

The same arguments make the same file. `Bert` keeps its weights, so that a test can compute what
llama.cpp should.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.gguf_maker import CONTROL, vocabulary

Array = NDArray[np.float32]

WIDTH, LAYERS, HEADS, FFN = 32, 2, 4, 64

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = ("the", "cat", "dog", "panda", "bear", "sits", "runs", "what", "is", "on", "mat")
#: The mark at the start of a word in llama.cpp's WordPiece vocabularies; later pieces have none.
_MARK = "\u2581"
_LETTERS = string.ascii_lowercase + string.digits + ".,!?"
WORD_PIECES = (*_SPECIAL, *(_MARK + word for word in (*_WORDS, *_LETTERS)), *_LETTERS)
CLS, SEP = 2, 3


@attrs.frozen
class Bert:
    """An encoder with a WordPiece vocabulary: its file, and its weights by name."""

    path: Path
    weights: dict[str, Array]


def write_bert(
    path: Path,
    *,
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    labels: Sequence[str] = (),
    context: int = 64,
    seed: int = 0,
) -> Bert:
    """Write a BERT. With labels it has a head that gives a score for each of them."""
    writer = gguf.GGUFWriter(str(path), "bert")
    _describe(writer, path.stem, context)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if labels:
        writer.add_classifier_output_labels(list(labels))
    _word_pieces(writer)
    weights = _bert_weights(np.random.default_rng(seed), context, len(labels))
    finish(writer, weights)
    return Bert(path, weights)


def _describe(writer: gguf.GGUFWriter, name: str, context: int) -> None:
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)


def _word_pieces(writer: gguf.GGUFWriter) -> None:
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    n_special = len(_SPECIAL)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(list(WORD_PIECES))
    writer.add_token_types([control] * n_special + [normal] * (len(WORD_PIECES) - n_special))
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(CLS)
    writer.add_eos_token_id(SEP)
    writer.add_sep_token_id(SEP)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def _bert_weights(rng: np.random.Generator, context: int, n_labels: int) -> dict[str, Array]:
    def matrix(rows: int, columns: int) -> Array:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def vector(size: int) -> Array:
        return rng.normal(0, 0.1, size).astype(np.float32)

    weights = {
        "token_embd.weight": matrix(len(WORD_PIECES), WIDTH),
        "token_types.weight": matrix(2, WIDTH),
        "position_embd.weight": matrix(context, WIDTH),
        "token_embd_norm.weight": 1 + vector(WIDTH),
        "token_embd_norm.bias": vector(WIDTH),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights[f"{block}.{name}.weight"] = matrix(WIDTH, WIDTH)
            weights[f"{block}.{name}.bias"] = vector(WIDTH)
        weights[f"{block}.ffn_up.weight"] = matrix(FFN, WIDTH)
        weights[f"{block}.ffn_up.bias"] = vector(FFN)
        weights[f"{block}.ffn_down.weight"] = matrix(WIDTH, FFN)
        weights[f"{block}.ffn_down.bias"] = vector(WIDTH)
        for name in ("attn_output_norm", "layer_output_norm"):
            weights[f"{block}.{name}.weight"] = 1 + vector(WIDTH)
            weights[f"{block}.{name}.bias"] = vector(WIDTH)
    if n_labels:
        weights["cls.weight"], weights["cls.bias"] = matrix(WIDTH, WIDTH), vector(WIDTH)
        weights["cls.output.weight"] = matrix(n_labels, WIDTH)
        weights["cls.output.bias"] = vector(n_labels)
    return weights


def write_decoder(
    path: Path,
    *,
    pooling: gguf.PoolingType | None = gguf.PoolingType.LAST,
    labels: Sequence[str] = (),
    rerank_template: str | None = None,
    context: int = 512,
    seed: int = 0,
    change: Callable[[dict[str, Array]], None] = lambda weights: None,
) -> Path:
    """Write a causal model, as embedding models are that were made from a chat model.

    It is a Llama; with labels a Qwen3, which has a head that gives the share of each of them.
    `change` gets the weights before they are written.
    """
    writer = gguf.GGUFWriter(str(path), "qwen3" if labels else "llama")
    _describe(writer, path.stem, context)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if labels:
        writer.add_key_length(WIDTH // HEADS)
        writer.add_value_length(WIDTH // HEADS)
        writer.add_classifier_output_labels(list(labels))
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if rerank_template is not None:
        writer.add_chat_template([{"name": "rerank", "template": rerank_template}])
    n_vocab = write_byte_pairs(writer)
    weights = _decoder_weights(np.random.default_rng(seed), n_vocab, len(labels))
    change(weights)
    finish(writer, weights)
    return path


def write_byte_pairs(writer: gguf.GGUFWriter, more: Sequence[str] = ()) -> int:
    """Add a vocabulary of byte pairs, the last three control tokens; returns its size.

    `more` are further tokens before these three; those in angle brackets are control tokens, too.
    """
    size = 512
    tokens, merges, types = vocabulary(size)
    if more:
        place = size - len(CONTROL) - len(more)
        tokens[place : place + len(more)] = more
        for i, token in enumerate(more, place):
            types[i] = int(gguf.TokenType.CONTROL if token[0] == "<" else gguf.TokenType.NORMAL)
        merges = merges[: -len(more)]
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_bos_token_id(size - len(CONTROL))
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
    return size


def _decoder_weights(rng: np.random.Generator, n_vocab: int, n_labels: int) -> dict[str, Array]:
    def matrix(rows: int, columns: int) -> Array:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    ones, kv = np.ones(WIDTH, dtype=np.float32), WIDTH // 2
    weights = {"token_embd.weight": matrix(n_vocab, WIDTH), "output_norm.weight": ones}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        weights[f"{block}.attn_q.weight"] = matrix(WIDTH, WIDTH)
        weights[f"{block}.attn_k.weight"] = matrix(kv, WIDTH)
        weights[f"{block}.attn_v.weight"] = matrix(kv, WIDTH)
        weights[f"{block}.attn_output.weight"] = matrix(WIDTH, WIDTH)
        weights[f"{block}.ffn_gate.weight"] = matrix(FFN, WIDTH)
        weights[f"{block}.ffn_up.weight"] = matrix(FFN, WIDTH)
        weights[f"{block}.ffn_down.weight"] = matrix(WIDTH, FFN)
        weights[f"{block}.attn_norm.weight"] = weights[f"{block}.ffn_norm.weight"] = ones
        if n_labels:
            head = np.ones(WIDTH // HEADS, dtype=np.float32)
            weights[f"{block}.attn_q_norm.weight"] = weights[f"{block}.attn_k_norm.weight"] = head
    if n_labels:
        weights["cls.output.weight"] = matrix(n_labels, WIDTH)
    return weights


def finish(writer: gguf.GGUFWriter, weights: Mapping[str, Array]) -> None:
    """Write the file: what was added, and the tensors."""
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_flags(path: Path, *flags: str) -> Path:
    """Write a file with no more than some flags that are set."""
    writer = gguf.GGUFWriter(str(path), "clip")
    for flag in flags:
        writer.add_bool(flag, True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
