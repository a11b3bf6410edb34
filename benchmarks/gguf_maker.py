"""Write a GGUF with random weights: Llama architecture, byte-level BPE of any size.

    python -m benchmarks.gguf_maker --preset 110m-32k /tmp/110m-32k.gguf

Such a model says nothing, but costs what a real one of its shape costs: every matrix is full, and
greedy decoding wanders through the vocabulary. The same preset and seed make the same weights.

For speculative decoding there are pairs: in `pair` all layers after the first add almost nothing,
and `pair-draft` is its first layer alone, so that it mostly guesses the other's tokens. Both are
F16, where a CPU computes several rows faster together than one after the other.
Needs the packages `gguf` and `numpy`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import gguf
import numpy as np
from numpy.typing import NDArray

from trioserve.bench.prompts import SYLLABLES

#: Control tokens, at the end of the vocabulary.
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB = 256 + len(CONTROL)
#: With all that `merges` yields: syllables and words of up to three.
MAX_VOCAB = MIN_VOCAB + 2 * len(SYLLABLES) + 2 * len(SYLLABLES) ** 2 + len(SYLLABLES) ** 3
_BLOCK = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0]  # weights, bytes
_KINDS = {8: gguf.GGMLQuantizationType.Q8_0, 16: gguf.GGMLQuantizationType.F16}
#: The effect of a faint layer, as a share of that of another.
FAINT = 0.01

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@attrs.frozen(kw_only=True)
class Shape:
    """The size of a model. The output matrix is the embedding; weights are Q8_0, or F16.

    The last `faint_layers` add almost nothing: a model of the others, with the same seed, has the
    same weights and mostly the same output.

    Raises:
        ValueError: the sizes do not go together.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int = 32768
    faint_layers: int = 0
    bits: int = 8

    def __attrs_post_init__(self) -> None:
        if min(attrs.astuple(self)[:-2]) < 1:
            raise ValueError("every size must be at least 1")
        if not 0 <= self.faint_layers < self.layers:
            raise ValueError("faint-layers must be between 0 and layers - 1")
        if self.bits not in _KINDS:
            raise ValueError("bits must be 8 or 16")
        if self.width % _BLOCK[0] or self.ffn % _BLOCK[0]:
            raise ValueError(f"width and ffn must be multiples of {_BLOCK[0]} for Q8_0")
        if self.width % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError("width must be heads times an even number, heads a multiple of KV")
        if not MIN_VOCAB <= self.vocab <= MAX_VOCAB:
            raise ValueError(f"vocab must be between {MIN_VOCAB} and {MAX_VOCAB}")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(rows * columns for _name, rows, columns in self.matrices()) + self.width * (
            2 * self.layers + 1
        )

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, rows and columns of every matrix, in the order of the file."""
        yield "token_embd.weight", self.vocab, self.width
        kv = self.kv_heads * self.head_dim
        for layer in range(self.layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_q.weight", self.width, self.width
            yield f"{block}.attn_k.weight", kv, self.width
            yield f"{block}.attn_v.weight", kv, self.width
            yield f"{block}.attn_output.weight", self.width, self.width
            yield f"{block}.ffn_gate.weight", self.ffn, self.width
            yield f"{block}.ffn_up.weight", self.ffn, self.width
            yield f"{block}.ffn_down.weight", self.width, self.ffn

    def norms(self) -> Iterator[str]:
        """Yield the name of every norm."""
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight"
            yield f"blk.{layer}.ffn_norm.weight"
        yield "output_norm.weight"


PRESETS = {
    "tiny": Shape(vocab=2048, width=64, layers=2, heads=4, kv_heads=2, ffn=128),
    "25m-152k": Shape(vocab=151_936, width=128, layers=12, heads=4, kv_heads=4, ffn=1024),
    "110m-32k": Shape(vocab=32_000, width=768, layers=12, heads=12, kv_heads=12, ffn=2048),
    "0.5b-152k": Shape(vocab=151_936, width=896, layers=24, heads=14, kv_heads=2, ffn=4864),
}

PRESETS["pair"] = Shape(
    vocab=8192, width=768, layers=16, heads=12, kv_heads=4, ffn=3072, faint_layers=15, bits=16
)
PRESETS["pair-draft"] = attrs.evolve(PRESETS["pair"], layers=1, faint_layers=0)


# -- the vocabulary


def byte_symbols() -> list[str]:
    """Return the character that stands for each of the 256 bytes in a byte-level BPE."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = itertools.count(0x100)
    return [chr(byte if byte in shown else next(spare)) for byte in range(256)]


def merges() -> Iterator[tuple[str, str]]:
    """Yield merges of syllables, most urgent first: each makes a token that was not there.

    Syllables ("ba"), the same after a space, then words of two syllables ("badu") after a space
    and not, then of three. Every left and right side is made by a merge further up.
    """
    space = byte_symbols()[ord(" ")]
    yield from ((s[0], s[1]) for s in SYLLABLES)
    yield from ((space, s) for s in SYLLABLES)
    two = [a + b for a, b in itertools.product(SYLLABLES, SYLLABLES)]
    yield from ((space + pair[:2], pair[2:]) for pair in two)
    yield from ((pair[:2], pair[2:]) for pair in two)
    # Not three syllables after no space: " bada" + "du" is what text between spaces needs.
    yield from ((space + pair, s) for pair, s in itertools.product(two, SYLLABLES))


def vocabulary(size: int) -> tuple[list[str], list[str], list[int]]:
    """Return the tokens, the merges as llama.cpp reads them, and the types of the tokens."""
    taken = list(itertools.islice(merges(), size - 256 - len(CONTROL)))
    tokens = [*byte_symbols(), *(a + b for a, b in taken), *CONTROL]
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    types = [normal] * (size - len(CONTROL)) + [control] * len(CONTROL)
    return tokens, [f"{a} {b}" for a, b in taken], types


# -- the weights


def _quantiles() -> tuple[NDArray[np.int8], float]:
    """Return 256 equally likely int8 steps of a normal distribution, and their deviation."""
    normal = statistics.NormalDist()
    points = np.array([normal.inv_cdf((place + 0.5) / 256) for place in range(256)])
    steps = np.rint(points / points.max() * 127).astype(np.int8)
    return steps, float(steps.astype(np.float64).std())


def random_q8_0(
    rng: np.random.Generator, rows: int, columns: int, deviation: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Make a Q8_0 matrix of normal weights, shape (rows, bytes of a row).

    `deviation` is that of each row, shape (rows,). The blocks are made directly: one random byte
    picks one of 256 steps, and the scale of the block gives the deviation.
    """
    weights, size = _BLOCK
    steps, unit = _quantiles()
    blocks = np.empty((rows, columns // weights, size), dtype=np.uint8)
    scale = (deviation / unit).astype("<f2")
    blocks[:, :, :2] = scale.view(np.uint8).reshape(rows, 1, 2)
    picked = steps[np.frombuffer(rng.bytes(rows * columns), dtype=np.uint8)]
    blocks[:, :, 2:] = picked.view(np.uint8).reshape(rows, columns // weights, weights)
    return blocks.reshape(rows, -1)


def random_f16(
    rng: np.random.Generator, rows: int, columns: int, deviation: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Make an F16 matrix of normal weights, as `random_q8_0` does; shape (rows, 2 * columns)."""
    steps, unit = _quantiles()
    picked = steps[np.frombuffer(rng.bytes(rows * columns), dtype=np.uint8)]
    weights = picked.reshape(rows, columns) * (deviation / unit).astype(np.float32)[:, None]
    return weights.astype("<f2").view(np.uint8)


def deviations(shape: Shape, name: str, rows: int, columns: int) -> NDArray[np.float32]:
    """Return the deviation of each row of a matrix, shape (rows,).

    Matrices keep the size of what goes through them. The embedding is small beside what the layers
    add, or the model would repeat its input. Tokens that are no text by themselves (control
    tokens, bytes outside ASCII, control characters) get almost none, so greedy decoding never
    picks them.
    """
    if name != "token_embd.weight":
        share = FAINT if _is_faint(shape, name) else 1.0
        return np.full(rows, share * columns**-0.5, dtype=np.float32)
    result = np.full(rows, 0.02, dtype=np.float32)
    result[:0x21] = result[0x7F:256] = 0.0002
    result[shape.vocab - len(CONTROL) :] = 0.0002
    return result


def _is_faint(shape: Shape, name: str) -> bool:
    _blk, layer, matrix, _weight = name.split(".")
    ends = matrix in ("attn_output", "ffn_down")
    return ends and int(layer) >= shape.layers - shape.faint_layers


# -- the file


def write(
    path: Path,
    shape: Shape,
    *,
    name: str = "random",
    seed: int = 0,
    writer: type[gguf.GGUFWriter] = gguf.GGUFWriter,
) -> None:
    """Write a model. Tensors go out one by one, so memory holds only the largest.

    `writer` may add metadata before it writes the header.

    Raises:
        OSError: the file can't be written.
    """
    file = writer(str(path), "llama")
    _write_metadata(file, shape, name)
    kind = _KINDS[shape.bits]
    make = random_q8_0 if shape.bits == 8 else random_f16
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    plan = list(shape.matrices())
    for tensor, rows, columns in plan:
        row = columns // weights * size
        file.add_tensor_info(tensor, (rows, row), np.dtype(np.uint8), rows * row, kind)
    for tensor in shape.norms():
        file.add_tensor_info(tensor, (shape.width,), np.dtype(np.float32), 4 * shape.width)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    rng = np.random.Generator(np.random.PCG64(seed))
    for tensor, rows, columns in plan:
        file.write_tensor_data(make(rng, rows, columns, deviations(shape, tensor, rows, columns)))
    for tensor in shape.norms():
        # The last norm gives the logits a deviation of 3, about that of a trained model.
        gain = 3 / (0.02 * shape.width**0.5) if tensor == "output_norm.weight" else 1.0
        file.write_tensor_data(np.full(shape.width, gain, dtype=np.float32))
    file.close()


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(name)
    writer.add_description("random weights for benchmarks")
    is_half = shape.bits == 16
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_F16 if is_half else gguf.LlamaFileType.MOSTLY_Q8_0
    )
    writer.add_quantization_version(2)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    tokens, merged, types = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merged)
    writer.add_token_types(types)
    end_of_text, _start, end_of_turn = range(shape.vocab - len(CONTROL), shape.vocab)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_turn)
    writer.add_pad_token_id(end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when the shape is impossible or the file can't be written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gguf_maker", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    for field in attrs.fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=None, help=f"{field.name} of another shape")
    options = parser.parse_args(argv)
    given = {f.name: getattr(options, f.name) for f in attrs.fields(Shape)}
    changes = {name: value for name, value in given.items() if value is not None}
    try:
        shape = attrs.evolve(PRESETS[options.preset], **changes)
        write(options.path, shape, name=options.path.stem, seed=options.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = options.path.stat().st_size
    print(f"{options.path}: {shape.parameters / 1e6:.1f}M parameters, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
