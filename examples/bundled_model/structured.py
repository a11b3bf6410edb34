"""JSON with given values."""

from __future__ import annotations

import json
from random import Random

from examples.bundled_model import lexicon
from examples.bundled_model.document import Turn
from examples.bundled_model.words import table

_WORDS = table("structured")

Value = str | int | float | bool | list["Value"] | dict[str, "Value"]


def field(rng: Random) -> tuple[str, Value]:
    """Return a key and a value that fits it."""
    match rng.randint(0, 11):
        case 0 | 1:
            return "name", lexicon.full_name(rng)
        case 2:
            return "age", rng.randint(1, 99)
        case 3:
            return rng.choice(("city", "place", "location")), lexicon.city(rng)
        case 4:
            return rng.choice(("color", "favorite_color")), rng.choice(lexicon.COLORS)
        case 5:
            return rng.choice(("id", "count", "number", "year", "total")), lexicon.number(rng)
        case 6:
            return rng.choice(("price", "weight", "score")), lexicon.number(rng) + rng.randint(
                1, 9
            ) / 10
        case 7:
            return rng.choice(("active", "done", "admin", "valid")), rng.random() < 0.5
        case 8:
            return rng.choice(("code", "key", "token", "title")), lexicon.pseudo_word(rng)
        case 9:
            return rng.choice(("hobby", "job", "animal", "food")), lexicon.word(rng)
        case 10:
            return lexicon.pseudo_word(rng), rng.choice((lexicon.word(rng), lexicon.number(rng)))
        case _:
            return rng.choice(lexicon.NOUNS), rng.choice((lexicon.word(rng), lexicon.number(rng)))


def plain(value: Value) -> str:
    """Return a value as it would stand in a sentence."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def join(items: list[str]) -> str:
    """Join items with commas and an ``and``."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


STARTS: list[str] = _WORDS["starts"]
ENDS: list[str] = _WORDS["ends"]


def json_object(rng: Random) -> Turn:
    """Ask for an object with given values."""
    fields: dict[str, Value] = dict(field(rng) for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))))
    if rng.random() < 0.15:
        fields[rng.choice(("tags", "items", "colors", "friends"))] = [
            lexicon.word(rng) for _ in range(rng.randint(1, 4))
        ]
    key = json.dumps(fields)
    end = rng.choice(ENDS)
    answer: Value = fields
    roll = rng.random()
    if roll < 0.45:
        link = rng.choice(
            (
                "{} {}",
                "{} {}",
                "{} {}",
                "{} = {}",
                "{}={}",
                "{}: {}",
                '{} "{}"',
                "the {} {}",
                "{} is {}",
                "{} set to {}",
                "{} equal to {}",
            )
        )
        said = join([link.format(k, plain(v)) for k, v in fields.items()])
        ask = f"{rng.choice(STARTS)} {said}{end}"
    elif roll < 0.6:
        lines = [f"{k}: {plain(v)}" for k, v in fields.items()]
        start = rng.choice(
            ("Convert to JSON", "Turn this into JSON", "Write as JSON", "Format as JSON")
        )
        ask = rng.choice((f"{start}:\n" + "\n".join(lines), f"{start}: " + ", ".join(lines)))
    elif roll < 0.7:
        ask = (
            f"{rng.choice(STARTS)} the keys {join(list(fields))} and the values "
            f"{join([plain(v) for v in fields.values()])}{end}"
        )
    elif roll < 0.85:
        ask, answer = _extract(rng)
    else:
        ask, answer = _nested(rng)
        ask += end
    return Turn(
        "json",
        ask,
        json.dumps(answer, ensure_ascii=False),
        key=key if answer is fields else ask,
        thought="I write only the JSON object.",
    )


def _extract(rng: Random) -> tuple[str, Value]:
    name, place, age = lexicon.full_name(rng), lexicon.city(rng), rng.randint(1, 99)
    hobby = rng.choice(lexicon.HOBBIES)
    text, values = rng.choice(
        (
            (
                f"{name} is {age} years old and lives in {place}.",
                {"name": name, "age": age, "city": place},
            ),
            (f"My name is {name} and I am {age}.", {"name": name, "age": age}),
            (
                f"{name} lives in {place} and likes {hobby}.",
                {"name": name, "city": place, "hobby": hobby},
            ),
            (f"{name}, {age}, from {place}.", {"name": name, "age": age, "city": place}),
        )
    )
    keys = list(values)
    if rng.random() < 0.4:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    start = rng.choice(("Extract", "Give me", "Return", "Get"))
    ask = rng.choice(
        (f"{text} {start} {join(keys)} as JSON.", f"{start} {join(keys)} as JSON: {text}")
    )
    return ask, {key: values[key] for key in keys}


def _nested(rng: Random) -> tuple[str, Value]:
    inner: dict[str, Value] = dict(field(rng) for _ in range(rng.randint(1, 2)))
    outer, (key, value) = (
        rng.choice(("user", "person", "data", "address", "order", "pet")),
        field(rng),
    )
    items = [plain(field(rng)[1]) for _ in range(rng.randint(2, 4))]
    said = join([f"{k} {plain(v)}" for k, v in inner.items()])
    start = rng.choice(STARTS)
    if rng.random() < 0.4:
        return rng.choice(
            (
                f"Give me a JSON list of {join(items)}",
                f"Write a JSON array with {join(items)}",
                f"Return the list {', '.join(items)} as JSON",
            )
        ), list(items)
    if rng.random() < 0.5 and key != outer:
        return f"{start} {key} {plain(value)} and {outer} with {said}", {key: value, outer: inner}
    return f"{start} {outer} with {said}", {outer: inner}
