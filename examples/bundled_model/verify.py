"""Compare a checkpoint and its GGUF file: the same ids for text, the same scores."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from llama_cpp import Llama as LlamaCpp

from examples.bundled_model.corpus import documents
from examples.bundled_model.export import load_checkpoint
from examples.bundled_model.tokenizer import load_tokenizer

TEXTS = (
    "Hello, world!",
    "  two  spaces   three\n\n\nlines\t\ttabs \n \n x",
    "it's I'M we'LL don't 'quoted' \"Ada\"",
    "12345 007 3.14159 1e-5 0xFF 2026-11-21 ٣٤٥ ½ ²",
    "def f(x):\n    return x**2  # square\r\n\r\nif __name__ == '__main__': pass",
    "naïve café Straße żółw ÅÄÖ Ærø Ñandú",
    "привет мир γειά κόσμος שלום مرحبا नमस्ते दुनिया",
    "你好世界 こんにちは ありがとう 안녕하세요",
    "😀😃 👍🏽 👨‍👩‍👧‍👦 ❤️ 🇫🇷 ✨",
    '{"name": "Ada", "list": [1, 2, {"x": null}]}',
    "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call><tool_response>x</tool_response>",
    "<|im_start|>user\nhi<|im_end|>\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "a\u00a0b\u2003c\u200bd\ufeffe \x00 \x7f \x1b[0m",
    "<|im_start|> <|im_en <think <|endoftext|>",
    "",
    " ",
    "\n",
    "!!!???...,,,;;;---___***",
    "e\u0301 combining a\u0308",
)


def main() -> None:
    """Compare the ids of many texts, and the scores at every position of one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("trioserve/models/bundled.gguf"))
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    cpp = LlamaCpp(str(options.model), n_ctx=1024, logits_all=True, verbose=False)
    stream = [made.render() for made in islice(documents(5), 400)]
    different = 0
    for text in (*TEXTS, *stream):
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        theirs = cpp.tokenize(text.encode(), add_bos=False, special=True)
        back = cpp.detokenize(theirs, special=True).decode()
        if ours != theirs or back != text:
            different += 1
            print(f"different: {text!r}\n  {ours}\n  {theirs}\n  {back!r}")
    print(f"texts: {len(TEXTS) + len(stream)}, different: {different}")
    ids = tokenizer.encode("".join(stream[:8]), add_special_tokens=False).ids[:700]
    cpp.eval(ids)
    with torch.no_grad():
        ours_scores = load_checkpoint(options.checkpoint)(torch.tensor([ids]))[0].numpy()
    their_scores = cpp.scores[: len(ids)]
    gap = np.abs(ours_scores - their_scores)
    same = float((ours_scores.argmax(-1) == their_scores.argmax(-1)).mean())
    print(
        f"scores: mean gap {gap.mean():.4f}, largest {gap.max():.3f}, "
        f"spread {ours_scores.std():.2f}, same first choice {100 * same:.1f} %"
    )


if __name__ == "__main__":
    main()
