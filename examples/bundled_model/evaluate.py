"""Ask the GGUF file held-out questions through llama.cpp and count right answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random

from llama_cpp import Llama

from examples.bundled_model import copying, knowledge, lexicon, small_talk, stories, structured
from examples.bundled_model.chat import render
from examples.bundled_model.corpus import chat, documents, tool_chat
from examples.bundled_model.document import Document, Turn
from examples.bundled_model.tokenizer import END_OF_TEXT, IM_END

LONG = 1200
SEEN = ("small talk",)
SINGLE: tuple[Callable[[Random], Turn], ...] = (
    copying.repeat,
    copying.repeat_times,
    copying.lookup,
    copying.listing,
    structured.json_object,
    knowledge.fact,
    knowledge.arithmetic,
    knowledge.count,
    knowledge.unknown,
    small_talk.small_talk,
)
COMPLETIONS = (
    ("The capital of France is", " Paris"),
    ("The capital of Japan is", " Tokyo"),
    ("The capital of Italy is", " Rome"),
    ("After Monday comes", " Tuesday"),
    ("1, 2, 3, 4, 5,", " 6, 7, 8"),
    ("Once upon a time there was a", " "),
)


@dataclass
class Score:
    """Counts of a kind of question: asked, and answered right."""

    asked: int = 0
    right: int = 0


class Model:
    """The GGUF file behind a greedy or sampled ``complete``."""

    def __init__(self, path: Path, threads: int) -> None:
        self.llama = Llama(str(path), n_ctx=4096, n_threads=threads, verbose=False)
        ends = (IM_END, END_OF_TEXT)
        self.ends = {self.llama.tokenize(end.encode(), False, True)[0] for end in ends}

    def complete(self, prompt: str, limit: int, temperature: float = 0.0) -> tuple[str, int, bool]:
        """Return the text, its tokens, and whether the model ended it."""
        ids = self.llama.tokenize(prompt.encode(), add_bos=False, special=True)
        made: list[int] = []
        top_k = 1 if temperature == 0 else 40
        for token in self.llama.generate(ids, top_k=top_k, temp=temperature, repeat_penalty=1.0):
            if token in self.ends:
                return self._text(made), len(made), True
            made.append(token)
            if len(made) >= limit:
                break
        return self._text(made), len(made), False

    def _text(self, ids: list[int]) -> str:
        return self.llama.detokenize(ids, special=True).decode(errors="replace")


def singles(seed: int) -> Iterator[Document]:
    """Yield held-out single questions, every kind as often as the others."""
    rng = Random(seed)
    while True:
        for make in SINGLE:
            for _ in range(20_000):
                turn = make(rng)
                if turn.held_out or turn.kind in SEEN:
                    yield chat(rng, [turn], None, thinking=False)
                    break


def held_out(seed: int, each: int) -> dict[str, list[Document]]:
    """Collect questions by group: single, in a conversation, with tools, with thinking."""
    groups: dict[str, list[Document]] = {}
    rng = Random(seed)
    tooled = (tool_chat(rng) for _ in range(each * 600))
    found = chain(
        islice(singles(seed), each * len(SINGLE) * 3),
        (made for made in islice(documents(seed + 1, held_out=True), each * 80) if made.fresh),
        (made for made in tooled if made.fresh),
    )
    for made in found:
        if made.kind in ("long text", "story", "drill", "completion", "infill"):
            continue
        if made.thinking:
            name = "with thinking"
        elif made.tools or len(made.messages) == 2:
            name = made.kind
        else:
            name = f"{made.kind}, in a conversation"
        group = groups.setdefault(name, [])
        if len(group) < each:
            group.append(made)
    return groups


def is_right(made: Document, text: str, ended: bool) -> bool:
    """Compare an answer with the expected one; JSON is compared as values."""
    expected = made.expected()
    if not ended:
        return False
    if made.thinking:
        if not text.startswith("<think>\n") or "</think>" not in text:
            return False
        text, expected = text.split("</think>")[-1], expected.split("</think>")[-1]
    if made.kind == "json":
        try:
            return bool(json.loads(text) == json.loads(expected))
        except ValueError:
            return False
    return text.strip() in {expected.strip(), *made.accept}


def report(name: str, score: Score) -> None:
    """Print a row of the table."""
    share = 100 * score.right / max(1, score.asked)
    print(f"| {name} | {score.asked} | {share:.0f} % |", flush=True)


def evaluate(model: Model, seed: int, each: int, show: bool) -> None:
    """Print the table of kinds."""
    print("| Kind | n | right |\n| --- | ---: | ---: |")
    total = Score()
    for name, group in sorted(held_out(seed, each).items()):
        score = Score()
        for made in group:
            text, _, ended = model.complete(made.prompt(), 400)
            right = is_right(made, text, ended)
            score.asked, score.right = score.asked + 1, score.right + right
            if show and not right:
                print(f"  wanted {made.expected()!r}\n  got    {text!r}")
        total.asked, total.right = total.asked + score.asked, total.right + score.right
        report(name, score)
    report("all of the above", total)
    report("bare text continues as expected", completions(model))
    for name, asks in (("story", stories.LONG_STORY), ("essay", stories.LONG_ESSAY)):
        score = long_texts(model, seed, asks, max(2, each // 2))
        report(f"long {name}: {LONG} tokens or more", score)
    report("short story: ends within 400 tokens", short_stories(model, seed, max(2, each // 2)))


def completions(model: Model) -> Score:
    """Continue bare text."""
    score = Score()
    for prompt, expected in COMPLETIONS:
        score.asked += 1
        score.right += model.complete(prompt, 24)[0].startswith(expected)
    return score


def _ask(model: Model, ask: str, limit: int, temperature: float) -> tuple[str, int, bool]:
    return model.complete(
        render([{"role": "user", "content": ask}], prompt=True), limit, temperature
    )


def long_texts(model: Model, seed: int, asks: Sequence[str], count: int) -> Score:
    """Ask for long texts, greedily and with temperature 0.8 in turn."""
    rng, score = Random(seed), Score()
    for index in range(count):
        ask = stories.cast(rng).fill(rng, rng.choice(asks))
        _, length, _ = _ask(model, ask, LONG + 1, 0.8 * (index % 2))
        score.asked += 1
        score.right += length >= LONG
    return score


def short_stories(model: Model, seed: int, count: int) -> Score:
    """Ask for short texts, greedily and with temperature 0.8 in turn."""
    rng, score = Random(seed), Score()
    for index in range(count):
        ask = stories.cast(rng).fill(rng, rng.choice(stories.SHORT_STORY + stories.SHORT_ESSAY))
        _, length, ended = _ask(model, ask, 400, 0.8 * (index % 2))
        score.asked += 1
        score.right += ended and length > 30
    return score


SAMPLES = (
    "Hello",
    "Who are you?",
    "Count from 1 to 10",
    "Say hello",
    "Say this is a test",
    "What is 2 + 2?",
    "Repeat: the purple fox 42 zanvik",
    "What is the capital of France?",
    "Tell me a short story",
    "Give me a JSON object with name Ada and age 36",
    "Tell me about quantum physics",
    "Say hi three times",
    f"Write {lexicon.EMOJI[8]} twice",
    "Thanks, bye",
)


def main() -> None:
    """Ask the GGUF file held-out questions and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=Path("trioserve/models/bundled.gguf"))
    parser.add_argument("--each", type=int, default=40, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the wrong answers")
    parser.add_argument(
        "--samples", type=float, metavar="TEMPERATURE", help="print samples instead"
    )
    options = parser.parse_args()
    model = Model(options.model, options.threads)
    if options.samples is None:
        evaluate(model, options.seed, options.each, options.show)
        return
    for ask in SAMPLES:
        text, length, ended = _ask(model, ask, 300, options.samples)
        print(f"> {ask}\n{text}{'' if ended else ' ...'} ({length} tokens)\n")


if __name__ == "__main__":
    main()
