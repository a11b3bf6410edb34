"""Small models with random weights, in place of those that llama-server's tests download.

Those tests are written for models of a hub: a Llama of 260,000 parameters with a SentencePiece
vocabulary of 512 tokens, another one with a LoRA adapter, two encoders, and a Gemma 3 that sees
images. The files made here are of the same kinds and sizes, but what they write is random.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.gguf_models import write_bert
from tests.support.media_files import image_file
from tests.support.media_models import write_pair

Array = NDArray[np.float32]

_WIDTH, _LAYERS, _HEADS, _KV_HEADS, _FFN = 64, 5, 8, 4, 172
_CONTEXT = 2048
_N_TOKENS = 512
_CONTROL = ("<unk>", "<s>", "</s>")
_FIM = ("<PRE>", "<SUF>", "<MID>")
_COMMIT = "0" * 40
_BLANK = "\u2581"

#: What the pieces of the vocabulary are learned from.
_STORY = """
Once upon a time there was a little girl named Anna who lived with her mom and dad in a small house
near the park. One day she went outside to play with her friend Tim. They saw a big red ball under a
tree, and they were very happy. "Can we play with it?" said Tim. "Yes, let us play together!" said
Anna. They played all day until it was time to go home. Then her mom said that the ball was not
theirs, so they had to give it back. Anna was sad at first, but she wanted to be kind. The next
morning they looked for the boy who had lost his ball. He was so happy that he asked them to play
every day. From then on they were best friends, and they learned that it is good to share and to
help each other. The bird in the garden sang a song about the sun, the rain and the blue sky, and
everyone listened for a long time before they went to sleep in their warm beds.
"""


def write_all(folder: Path) -> dict[str, Path]:
    """Write what is not there yet, and return the file that stands for each repository."""
    folder.mkdir(parents=True, exist_ok=True)
    story, infill = folder / "stories.gguf", folder / "stories-infill.gguf"
    lora, encoder, judge = folder / "lora.gguf", folder / "encoder.gguf", folder / "judge.gguf"
    if not judge.exists():
        _write_story(story, infill=False)
        _write_story(infill, infill=True)
        _write_lora(lora)
        write_bert(encoder, context=512)
        write_bert(judge, context=512, pooling=gguf.PoolingType.RANK, labels=["LABEL_0"])
    return {
        "ggml-org/tinygemma3-GGUF:Q8_0": write_pair(folder, "gemma3").model,
        "ggml-org/test-model-stories260K": story,
        "ggml-org/test-model-stories260K-infill": infill,
        "ggml-org/stories15M_MOE/stories15M_MOE-F16.gguf": story,
        "ggml-org/models/bert-bge-small/ggml-model-f16.gguf": encoder,
        "ggml-org/models/jina-reranker-v1-tiny-en/ggml-model-f16.gguf": judge,
        "moe_shakespeare15M.gguf": lora,
    }


def projectors(folder: Path) -> dict[Path, Path]:
    """The projector of each model that sees, among those that `write_all` has written."""
    pair = write_pair(folder, "gemma3")
    return {pair.model: pair.projector}


def images() -> dict[str, bytes]:
    """The images of the tests, by the names of their files on the hub."""
    sizes = {"11_truck.png": (48, 32), "91_cat.png": (32, 32)}
    return {name: image_file(size=size) for name, size in sizes.items()}


def write_cache(folder: Path, models: dict[str, Path]) -> Path:
    """Write a cache of the hub, with the models that the tests of the router choose from."""
    story = models["ggml-org/test-model-stories260K"]
    infill = models["ggml-org/test-model-stories260K-infill"]
    for repo, name, path in (
        ("ggml-org/tinygemma3-GGUF", "tinygemma3-Q8_0.gguf", story),
        ("ggml-org/test-model-stories260K", "stories260K-F32.gguf", story),
        ("ggml-org/test-model-stories260K-infill", "stories260K-infill-F32.gguf", infill),
    ):
        home = folder / f"models--{repo.replace('/', '--')}"
        file = home / "snapshots" / _COMMIT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_symlink():
            file.symlink_to(path.resolve())
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(_COMMIT)
    return folder


def learn_pieces(text: str, n: int) -> list[str]:
    """Learn `n` pieces from a text: its letters, then the most frequent pairs, again and again."""
    words = Counter(tuple(_BLANK + word) for word in text.split())
    letters = Counter(letter for word, times in words.items() for letter in word * times)
    pieces = [letter for letter, _ in letters.most_common()]
    while len(pieces) < n:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        best, _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        words = Counter({_joined(word, best): times for word, times in words.items()})
        pieces.append("".join(best))
    return pieces[:n]


def _joined(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    found: list[str] = []
    for piece in word:
        if found and (found[-1], piece) == pair:
            found[-1] += piece
        else:
            found.append(piece)
    return tuple(found)


def _write_story(path: Path, *, infill: bool) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    n_vocab = _write_vocabulary(writer, infill)
    for name, tensor in _weights(n_vocab).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: gguf.GGUFWriter, infill: bool) -> int:
    kinds = gguf.TokenType
    pieces = learn_pieces(_STORY, _N_TOKENS - len(_CONTROL) - 256)
    marks = _FIM if infill else ()
    tokens = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *marks]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    types += [kinds.BYTE] * 256 + [kinds.NORMAL] * len(pieces) + [kinds.CONTROL] * len(marks)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(max(place - 258, 0)) for place in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    if infill:
        writer.add_uint32("tokenizer.ggml.prefix_token_id", _N_TOKENS)
        writer.add_uint32("tokenizer.ggml.suffix_token_id", _N_TOKENS + 1)
        writer.add_uint32("tokenizer.ggml.middle_token_id", _N_TOKENS + 2)
    return len(tokens)


def _weights(n_vocab: int) -> dict[str, Array]:
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> Array:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    ones, kv = np.ones(_WIDTH, dtype=np.float32), _WIDTH * _KV_HEADS // _HEADS
    embedding = rng.normal(0, 0.02, (n_vocab, _WIDTH)).astype(np.float32)
    embedding[: len(_CONTROL) + 256] *= 0.01  # no control tokens and no halves of characters
    embedding[_N_TOKENS:] *= 0.01
    gain = np.float32(3 / (0.02 * _WIDTH**0.5))
    weights = {"token_embd.weight": embedding, "output_norm.weight": ones * gain}
    for layer in range(_LAYERS):
        block = f"blk.{layer}"
        weights[f"{block}.attn_q.weight"] = matrix(_WIDTH, _WIDTH)
        weights[f"{block}.attn_k.weight"] = matrix(kv, _WIDTH)
        weights[f"{block}.attn_v.weight"] = matrix(kv, _WIDTH)
        weights[f"{block}.attn_output.weight"] = matrix(_WIDTH, _WIDTH)
        weights[f"{block}.ffn_gate.weight"] = matrix(_FFN, _WIDTH)
        weights[f"{block}.ffn_up.weight"] = matrix(_FFN, _WIDTH)
        weights[f"{block}.ffn_down.weight"] = matrix(_WIDTH, _FFN)
        weights[f"{block}.attn_norm.weight"] = weights[f"{block}.ffn_norm.weight"] = ones
    return weights


def _write_lora(path: Path) -> None:
    rng = np.random.default_rng(8)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_output"):
            for side, shape in (("lora_a", (4, _WIDTH)), ("lora_b", (_WIDTH, 4))):
                values = rng.normal(0, 0.25, shape).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.{name}.weight.{side}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
