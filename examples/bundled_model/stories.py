"""Stories and essays from a grammar: short, middling, and long ones in chapters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from examples.bundled_model import lexicon
from examples.bundled_model.document import Turn
from examples.bundled_model.lexicon import words

OPENINGS = (
    "Once upon a time there was a {adj} {animal} named {hero}.",
    "Once upon a time, in a {adj} {place}, there lived a {animal} called {hero}.",
    "Long ago, a {adj} {animal} named {hero} lived near the {place}.",
    "There was once a {animal} named {hero} who lived in a {adj} {place}.",
)
MIDDLES = (
    "One {time}, {hero} found a {adj} {thing} under a tree.",
    "{hero} looked at the {thing} and wondered where it came from.",
    "Every {time}, {hero} walked to the {place} and back.",
    '"Where are we going?" asked {friend}.',
    '"We are going to the {place}," said {hero}.',
    '"I have never seen such a {adj} {thing}," said {friend}.',
    "The {animal} laughed, because the {thing} was {adj}.",
    "{friend} the {animal2} was waiting at the {place}.",
    "Together they carried the {thing} across the {place}.",
    "The road was {adj}, but {hero} was not afraid.",
    "In the {place} they met a {adj} old {animal3}.",
    'The old {animal3} said, "Only the {adj} can open the {thing}."',
    "{hero} thought about this for a long time.",
    "Then the rain began, and the {place} became {adj}.",
    "They rested near a {adj} {thing} and ate some {food}.",
    "At night the stars were {adj}, and {friend} sang a {adj2} song.",
    "{hero} could not sleep and listened to the wind.",
    "In the {time}, the {place} was quiet and {adj}.",
    "Something {adj} moved behind the {thing}.",
    "It was only a {adj} {animal3}, who had lost a {thing2}.",
    "{friend} gave the {animal3} some {food} and a {thing2}.",
    "{hero} remembered the words of the old {animal3}.",
    "They followed the river until they came to a {adj} {place}.",
    "There was a {thing} on the table and a {thing2} on the wall.",
    '"Do not touch the {thing}," whispered {friend}.',
    "But {hero} was {adj} and opened the door.",
    "Behind the door was a {adj} {thing2}.",
    "The {thing} was heavy, so they took turns.",
    "After a while, {friend} wanted to go home.",
    '"Just one more {time}," said {hero}.',
    "The wind was cold, and the {place} was far away.",
    "A {adj} light came from the {place}.",
    "{hero} and {friend} ran as fast as they could.",
    "Nobody in the {place} had ever seen a {adj} {thing}.",
    "All the animals came to look at it.",
    "The {animal2} told them a story about a {adj} {animal3}.",
)
ENDINGS = (
    "And so {hero} came home at last, {adj} and happy.",
    "From that {time} on, {hero} and {friend} were friends forever.",
    "{hero} put the {thing} on the shelf and smiled.",
    "In the end, the {place} was {adj} again, and everybody was glad.",
)
ESSAY_OPENINGS = (
    "{Topic} have been with us for a long time.",
    "There is a lot to say about {topic}.",
    "Many people like {topic}, and many people ask why.",
    "This essay is about {topic}.",
)
ESSAY_MIDDLES = (
    "First of all, {topic} are {adj}.",
    "Some people think that {topic} are {adj}, but others do not agree.",
    "In the past, {topic} were rare in the {place}.",
    "Today one can find {topic} in every {place}.",
    "A good example is the {adj} {thing}.",
    "It is often said that {topic} make life {adj}.",
    "Children learn about {topic} at school.",
    "There are {adj} {topic} and there are {adj2} {topic}.",
    "{name} from {city} has studied {topic} for {number} years.",
    "According to {name}, {topic} need a {adj} {place}.",
    "This is not easy to understand, but it is important.",
    "On the other hand, {topic} can be {adj} in the {time}.",
    "A {thing} and a {thing2} can help with that.",
    "Without {topic}, the {place} would be a {adj} place.",
    "One should never forget that {topic} take time.",
    "In {city}, people talk about {topic} every {time}.",
    "The history of {topic} is {adj} and {adj2}.",
    "Many books about {topic} have been written in {city}.",
    "A {adj} {thing} is more useful than it looks.",
    "For this reason, {topic} are worth a second look.",
    "Of course, not all {topic} are {adj}.",
    "What matters most is that {topic} stay {adj}.",
    "It is easy to see why {name} likes {topic}.",
    "The same is true for every {thing} in the {place}.",
)
ESSAY_ENDINGS = (
    "To sum up, {topic} are {adj}, and they will stay with us.",
    "In the end, everybody has to decide what {topic} mean to them.",
    "This is what can be said about {topic}.",
)
PLACES = words("""forest village castle valley garden river island mountain desert
city harbor market meadow cave kitchen library""")
TIMES = words("morning evening night day winter summer autumn spring")
TOPICS = words("""cats dogs books trees computers rivers cities friends gardens stars
birds trains mountains dreams schools songs flowers robots horses games ships
languages maps clocks bridges numbers""")
TITLES = words(
    """The Beginning|The Road|The River|The Stranger|The Night|The Storm
|The Secret|The Door|The Friend|The Mountain|The Letter|The Morning|The Lost Key
|The Old Song|The Market|The Way Back|The Island|The Light""",
    "|",
)
HEADINGS = words(
    """Introduction|History|Examples|Questions|Daily Life|Science|Art|Work
|Nature|Money|Health|The Future|Problems|Advice|People|Places""",
    "|",
)


@dataclass(frozen=True)
class Cast:
    """Who and what a text is about. It stays the same from start to end."""

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


LONG_STORY = (
    "Tell me a long story",
    "Write a long story",
    "Tell me a very long story",
    "Write a novel",
    "Tell me a long story about a {animal}",
    "Write a long story about a {animal} named {hero}",
    "Write a story with many chapters",
    "Tell me a long, long story",
    "Write a very long story.",
    "Please tell me a long story.",
    "Write a story of 1000 words",
    "Tell a long story.",
    "Write a 2000 word story",
    "Write a long text",
)
LONG_ESSAY = (
    "Write an essay about {topic}",
    "Write a long essay about {topic}",
    "Write a book about {topic}",
    "Write an essay on {topic}.",
    "Write a very long essay about {topic}",
    "Tell me everything about {topic}",
    "Write 1000 words about {topic}",
    "Explain {topic} in great detail",
    "Write a long article about {topic}",
)
STORY = (
    "Tell me a story",
    "Write a story",
    "Tell me a story about a {animal}",
    "Once upon a time",
    "Write a story about a {animal} named {hero}",
    "Tell me a bedtime story",
    "Continue the story",
)
SHORT_STORY = (
    "Tell me a short story",
    "Write a short story",
    "Tell me a short story about a {animal}",
    "Write a short story about a {animal} named {hero}",
    "Tell me a very short story.",
)
SHORT_ESSAY = (
    "Write a short essay about {topic}",
    "Tell me about {topic}",
    "Tell me something about {topic}",
    "What do you think about {topic}?",
    "Write a paragraph about {topic}",
    "Write a short text about {topic}",
    "Explain {topic}",
    "Write about {topic}",
)


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
