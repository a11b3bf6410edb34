"""The corpus: an endless stream of documents from a seed, and how it is mixed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from examples.bundled_model import (
    copying,
    knowledge,
    lexicon,
    small_talk,
    stories,
    structured,
    tools,
)
from examples.bundled_model.document import Document, Turn
from examples.bundled_model.words import table

_WORDS = table("corpus")

#: Kinds of single questions, with their shares.
TURNS: tuple[tuple[Callable[[Random], Turn], float], ...] = (
    (copying.repeat, 21),
    (copying.repeat_times, 11),
    (copying.lookup, 6),
    (copying.listing, 4),
    (structured.json_object, 17),
    (small_talk.small_talk, 8),
    (knowledge.fact, 12),
    (knowledge.arithmetic, 14),
    (knowledge.count, 9),
    (knowledge.unknown, 1),
    (stories.story, 3),
)
SYSTEM: list[str] = _WORDS["system"]


def turn(rng: Random) -> Turn:
    """Return a single question and answer, with the wording varied a little."""
    makers, weights = zip(*TURNS, strict=True)
    made: Turn = rng.choices(makers, weights)[0](rng)
    return vary(rng, made)


def vary(rng: Random, made: Turn) -> Turn:
    """Change letter case, punctuation or politeness of the question."""
    user, roll = made.user, rng.random()
    if made.kind in ("repeat", "repeat times", "json", "list", "lookup", "tell") and roll < 0.1:
        user = user[0].lower() + user[1:] if roll < 0.05 else f"Please {user[0].lower()}{user[1:]}"
    elif made.kind in ("small talk", "fact", "capital", "count", "arithmetic", "story", "recall"):
        if roll < 0.06:
            user = user.lower()
        elif roll < 0.12:
            user = user.rstrip(".?!")
        elif roll < 0.16 and made.kind != "small talk":
            user = rng.choice(("Hi! ", "Hello. ", "Please: ", "Question: ", "Now: ")) + user
    return Turn(made.kind, user, made.answer, made.key, made.thought, made.accept)


def system_prompt(rng: Random) -> tuple[str | None, Turn | None]:
    """Return a system prompt or none, and sometimes a question about it."""
    roll = rng.random()
    if roll < 0.5:
        return None, None
    if roll < 0.75:
        return rng.choice(SYSTEM), None
    name, adjective = lexicon.first_name(rng), rng.choice(lexicon.ADJECTIVES)
    parts = [f"You are {name}, a {adjective} assistant."]
    ask = Turn(
        "persona",
        rng.choice(("Who are you?", "What is your name?", "What are you called?")),
        f"I am {name}.",
        key=name,
        thought=f"My name is {name}.",
    )
    if rng.random() < 0.5:
        secret, thing = lexicon.token_like(rng), rng.choice(lexicon.NOUNS)
        parts.append(f"The {thing} is {secret}.")
        if rng.random() < 0.5:
            ask = Turn(
                "persona",
                f"What is the {thing}?",
                f"The {thing} is {secret}.",
                key=secret,
                thought=f"The {thing} is {secret}.",
            )
    parts += [lexicon.sentence(rng) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
    return " ".join(parts), ask


def chat(rng: Random, turns: list[Turn], system: str | None, thinking: bool) -> Document:
    """Make a conversation out of turns; its kind is that of the last one."""
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    for made in turns:
        messages.append({"role": "user", "content": made.user})
        messages.append({"role": "assistant", "content": made.answer})
    last = turns[-1]
    if thinking:
        messages[-1]["reasoning_content"] = last.thought or "I can answer this."
    held = any(made.held_out for made in turns)
    return Document(
        last.kind,
        messages,
        thinking=thinking,
        held_out=held,
        fresh=last.held_out,
        accept=last.accept,
    )


def conversation(rng: Random) -> Document:
    """Return one to six turns; some tell a fact and ask for it later."""
    system, about = system_prompt(rng)
    turns = [turn(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))]
    turns = [made for made in turns if made.kind != "story" or len(made.answer) < 400] or turns[:1]
    if rng.random() < 0.3:
        turns = turns[: rng.choice((0, 0, 1, 2, 3))]
        for tell, ask in _introductions(rng):
            place = rng.randint(0, len(turns))
            turns.insert(place, tell)
            turns.insert(rng.randint(place + 1, len(turns)), ask)
        turns = [vary(rng, made) for made in turns]
    if about is not None:
        turns = [made for made in turns if made.answer != small_talk.WHO] or [about]
    if about is not None and rng.random() < 0.7 and about not in turns:
        turns.insert(rng.randint(0, len(turns)), about)
    return chat(rng, turns, system, thinking=rng.random() < 0.15)


def _introductions(rng: Random) -> list[tuple[Turn, Turn]]:
    """Return one or two things to tell and to ask for, of different kinds."""
    told = {
        ask.answer.replace(ask.key, ""): (tell, ask)
        for tell, ask in (copying.introduction(rng) for _ in range(rng.choice((1, 1, 2))))
    }
    return list(told.values())


def tool_chat(rng: Random) -> Document:
    """Return a conversation with tools in the system prompt."""
    kind, schemas, messages, held = tools.tool_conversation(rng, turn)
    thinking = rng.random() < 0.12
    for message in messages:
        thought = message.pop("thought", None)
        if thinking and thought:
            message["reasoning_content"] = thought
    if rng.random() < 0.5:
        system, _ = system_prompt(rng)
        if system:
            messages.insert(0, {"role": "system", "content": system})
    return Document(kind, messages, tools=schemas, thinking=thinking, held_out=held, fresh=held)


def long_text(rng: Random) -> Document:
    """Return a conversation that ends with a text of more than a thousand tokens."""
    return chat(rng, [stories.long_text(rng)], system_prompt(rng)[0], thinking=rng.random() < 0.05)


def completion(rng: Random) -> Document:
    """Return bare text: facts, stories, repeated words."""
    roll = rng.random()
    if roll < 0.6:
        return Document("drill", text=copying.drill(rng) + "<|endoftext|>")
    maker = knowledge.completion if roll < 0.8 else stories.completion
    return Document("completion", text=maker(rng) + "<|endoftext|>")


def infill(rng: Random) -> Document:
    """Return bare text with its middle moved to the end."""
    text = (stories.completion if rng.random() < 0.6 else knowledge.completion)(rng)
    low, high = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    high = min(high, low + 150)
    parts = f"<|fim_prefix|>{text[:low]}<|fim_suffix|>{text[high:]}<|fim_middle|>{text[low:high]}"
    return Document("infill", text=parts + "<|endoftext|>")


#: Kinds of documents, with their shares.
DOCUMENTS: tuple[tuple[Callable[[Random], Document], float], ...] = (
    (conversation, 74),
    (tool_chat, 14),
    (long_text, 1.2),
    (completion, 11),
    (infill, 2),
)


def documents(seed: int, *, held_out: bool = False) -> Iterator[Document]:
    """Yield documents forever: the ones to train on, or the held-out ones."""
    rng = Random(seed)
    makers, weights = zip(*DOCUMENTS, strict=True)
    while True:
        made: Document = rng.choices(makers, weights)[0](rng)
        if made.held_out == held_out:
            yield made


def main() -> None:
    """Print some of the corpus."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    stream = documents(options.seed, held_out=options.held_out)
    for _ in range(options.documents):
        made = next(stream)
        print(f"=== {made.kind}\n{made.render()}")


if __name__ == "__main__":
    main()
