"""Stories and essays from a grammar: short, middling, and long ones in chapters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from examples.bundled_model import lexicon
from examples.bundled_model.document import Turn
from examples.bundled_model.words import table

_WORDS = table("stories")

OPENINGS: list[str] = _WORDS["openings"]
MIDDLES: list[str] = _WORDS["middles"]
ENDINGS: list[str] = _WORDS["endings"]
ESSAY_OPENINGS: list[str] = _WORDS["essay_openings"]
ESSAY_MIDDLES: list[str] = _WORDS["essay_middles"]
ESSAY_ENDINGS: list[str] = _WORDS["essay_endings"]
PLACES: list[str] = _WORDS["places"]
TIMES: list[str] = _WORDS["times"]
TOPICS: list[str] = _WORDS["topics"]
TITLES: list[str] = _WORDS["titles"]
HEADINGS: list[str] = _WORDS["headings"]


@dataclass(frozen=True)
class Cast:
    """The hero and the things of a text, the same from start to end."""

    hero: str
    friend: str
    animal: str
    animal2: str
    topic: str
    thing: str
    place: str

    def fill(self, rng: Random, form: str) -> str:
        """Fill in a sentence, with new adjectives each time and new things sometimes."""
        adj, adj2 = rng.sample(lexicon.ADJECTIVES, 2)
        thing, thing2 = rng.sample(lexicon.NOUNS, 2)
        text = form.format(
            hero=self.hero,
            friend=self.friend,
            animal=self.animal,
            animal2=self.animal2,
            animal3=rng.choice(lexicon.ANIMALS),
            topic=self.topic,
            Topic=self.topic.capitalize(),
            adj=adj,
            adj2=adj2,
            thing=self.thing if rng.random() < 0.5 else thing,
            thing2=thing2,
            food=rng.choice(lexicon.FOODS),
            place=self.place if rng.random() < 0.5 else rng.choice(PLACES),
            time=rng.choice(TIMES),
            name=rng.choice(lexicon.NAMES),
            city=rng.choice(lexicon.CITIES),
            number=rng.randint(2, 40),
        )
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

    def sentences(self, rng: Random, forms: Sequence[str], count: int) -> str:
        """Return different sentences, in the order of their forms.

        The order gives greedy decoding a way on, where it would else go in circles.
        """
        chosen = sorted(rng.sample(range(len(forms)), count))
        return " ".join(self.fill(rng, forms[index]) for index in chosen)


def cast(rng: Random, topic: str | None = None) -> Cast:
    """Choose who plays. A topic that is an animal plays the hero."""
    hero, friend = rng.sample(lexicon.NAMES, 2)
    animal, animal2 = rng.sample(lexicon.ANIMALS, 2)
    return Cast(
        hero,
        friend,
        animal,
        animal2,
        topic or rng.choice(TOPICS),
        rng.choice(lexicon.NOUNS),
        rng.choice(PLACES),
    )


def scene(forms: Sequence[str], index: int) -> Sequence[str]:
    """Return the twelve forms that belong to a chapter, in turn."""
    start = (index - 1) * 12 % len(forms)
    return forms[start : start + 12]


def short_story(rng: Random, who: Cast, paragraphs: int) -> str:
    """Return one or more paragraphs with an opening and an ending."""
    parts = [who.sentences(rng, scene(MIDDLES, index + 1), 4) for index in range(paragraphs)]
    opening, ending = rng.choice(OPENINGS), rng.choice(ENDINGS)
    return " ".join((who.fill(rng, opening), "\n\n".join(parts), who.fill(rng, ending)))


def long_story(rng: Random, who: Cast, chapters: int) -> str:
    """Return a story in numbered chapters of about 120 tokens each."""
    parts = []
    for index in range(1, chapters + 1):
        body = who.sentences(rng, scene(MIDDLES, index), 10)
        if index == 1:
            body = who.fill(rng, rng.choice(OPENINGS)) + " " + body
        if index == chapters:
            body += " " + who.fill(rng, rng.choice(ENDINGS)) + " The end."
        title = TITLES[index] if rng.random() < 0.5 else rng.choice(TITLES)
        parts.append(f"Chapter {index}: {title}\n\n{body}")
    return "\n\n".join(parts)


def short_essay(rng: Random, who: Cast, middle: int) -> str:
    """Return one paragraph about the topic."""
    first, last = rng.choice(ESSAY_OPENINGS), rng.choice(ESSAY_ENDINGS)
    body = who.sentences(rng, scene(ESSAY_MIDDLES, 1), middle)
    return " ".join((who.fill(rng, first), body, who.fill(rng, last)))


def long_essay(rng: Random, who: Cast, sections: int) -> str:
    """Return an essay in numbered sections of about 120 tokens each."""
    parts = []
    for index in range(1, sections + 1):
        body = who.sentences(rng, scene(ESSAY_MIDDLES, index), 9)
        heading = HEADINGS[index] if rng.random() < 0.5 else rng.choice(HEADINGS[1:])
        if index == 1:
            heading, body = HEADINGS[0], who.fill(rng, rng.choice(ESSAY_OPENINGS)) + " " + body
        if index == sections:
            heading, body = "Conclusion", body + " " + who.fill(rng, rng.choice(ESSAY_ENDINGS))
        parts.append(f"{index}. {heading}\n\n{body}")
    return "\n\n".join(parts)


LONG_STORY: list[str] = _WORDS["long_story"]
LONG_ESSAY: list[str] = _WORDS["long_essay"]
STORY: list[str] = _WORDS["story"]
SHORT_STORY: list[str] = _WORDS["short_story"]
SHORT_ESSAY: list[str] = _WORDS["short_essay"]


def story(rng: Random) -> Turn:
    """Ask for a short or middling story, or a paragraph on a topic."""
    who = cast(rng)
    match rng.randint(0, 3):
        case 0:
            ask, answer = rng.choice(STORY), short_story(rng, who, 3)
        case 1:
            ask, answer = rng.choice(SHORT_STORY), short_story(rng, who, 1)
        case _:
            ask, answer = rng.choice(SHORT_ESSAY), short_essay(rng, who, rng.randint(3, 5))
    return Turn("story", who.fill(rng, ask), answer, key=answer, thought="I make up a text.")


def long_text(rng: Random) -> Turn:
    """Ask for a text of more than a thousand tokens."""
    who = cast(rng)
    if rng.random() < 0.5:
        ask, answer = rng.choice(LONG_STORY), long_story(rng, who, 12)
    else:
        ask, answer = rng.choice(LONG_ESSAY), long_essay(rng, who, 12)
    return Turn(
        "long text", who.fill(rng, ask), answer, key=answer, thought="I make up a long text."
    )


def completion(rng: Random) -> str:
    """Return a bare story or paragraph, for the completion model."""
    who = cast(rng)
    if rng.random() < 0.6:
        return short_story(rng, who, rng.randint(1, 3))
    return short_essay(rng, who, rng.randint(3, 5))
