"""The tokenizer: byte-level BPE whose splits llama.cpp knows as ``qwen2``.

The merges are learned with a stricter split than the one used afterwards: a
letter never joins the quote or bracket before it. So ``"Ada`` is a quote and
the same ``Ada`` as anywhere else, which makes copying into JSON easy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
PRE = "qwen2"

#: The expression llama.cpp uses for ``tokenizer.ggml.pre = "qwen2"``.
QWEN2_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: The same, but only a space may lead a word. Used to learn the merges.
LEARN_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
FIM_PREFIX = "<|fim_prefix|>"
FIM_SUFFIX = "<|fim_suffix|>"
FIM_MIDDLE = "<|fim_middle|>"

#: Never part of the text that the model writes.
CONTROL = (END_OF_TEXT, IM_START, IM_END, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE)
#: Single tokens that do appear in the text.
USER_DEFINED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split by the pattern, then map bytes to the byte-level alphabet."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from texts; the special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(LEARN_SPLIT)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL) - len(USER_DEFINED),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
    tokenizer.pre_tokenizer = _pre_tokenizer(QWEN2_SPLIT)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer that ``train_tokenizer`` made."""
    return Tokenizer.from_file(str(path))


def merges(tokenizer: Tokenizer) -> list[str]:
    """Return the merges in order, as GGUF wants them: two tokens and a space."""
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens' spellings in the order of their ids."""
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    return [by_id[index] for index in range(len(by_id))]


def main() -> None:
    """Learn a tokenizer from the corpus and save it."""
    from examples.bundled_model.corpus import documents

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument("--documents", type=int, default=20_000, help="how many to read")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()

    def texts() -> Iterator[str]:
        stream = documents(options.seed)
        for _ in range(options.documents):
            text = next(stream).render()
            for token in CONTROL + USER_DEFINED:
                text = text.replace(token, "\n")
            yield text

    tokenizer = train_tokenizer(texts())
    tokenizer.save(str(options.output))
    print(f"{options.output}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
