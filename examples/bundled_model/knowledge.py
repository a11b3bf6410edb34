"""Tasks whose answer is known: facts, counting, small sums."""

from __future__ import annotations

from random import Random

from examples.bundled_model import lexicon
from examples.bundled_model.document import Turn
from examples.bundled_model.words import pairs, table

_WORDS = table("knowledge")

CAPITALS = dict(pairs(_WORDS["capitals"]))
OPPOSITES = pairs(_WORDS["opposites"])
SOUNDS = dict(pairs(_WORDS["sounds"]))
THING_COLORS = dict(pairs(_WORDS["thing_colors"]))
LEGS = dict(pairs(_WORDS["legs"]))
BABIES = dict(pairs(_WORDS["babies"]))
DAYS: list[str] = _WORDS["days"]
MONTHS: list[str] = _WORDS["months"]
PLANETS: list[str] = _WORDS["planets"]
HELLO = dict(pairs(_WORDS["hello"]))
THANKS = dict(pairs(_WORDS["thanks"]))
NUMBERS: list[str] = _WORDS["numbers"]


def _capital(rng: Random) -> tuple[str, str, str]:
    country, capital = rng.choice(list(CAPITALS.items()))
    form = rng.choice(
        (
            "What is the capital of {}?",
            "What's the capital of {}?",
            "Name the capital of {}.",
            "Tell me the capital of {}",
            "Which city is the capital of {}?",
            "Capital of {}?",
            "Do you know the capital of {}?",
            "The capital of {} is",
        )
    )
    end = "" if capital.endswith(".") else "."
    answer = f"The capital of {country} is {capital}{end}"
    return form.format(country), answer, f"The capital of {country} is {capital}{end}"


def _other(rng: Random) -> tuple[str, str]:
    """Return a question and its answer from the small tables."""
    match rng.randint(0, 10):
        case 0:
            a, b = rng.choice(OPPOSITES)
            a, b = (a, b) if rng.random() < 0.5 else (b, a)
            ask = rng.choice(
                ("What is the opposite of {}?", "Opposite of {}?", "Tell me the opposite of {}.")
            )
            return ask.format(a), f"The opposite of {a} is {b}."
        case 1:
            animal, sound = rng.choice(list(SOUNDS.items()))
            ask = rng.choice(
                (
                    "What does a {} say?",
                    "What sound does a {} make?",
                    "Which sound does the {} make?",
                )
            )
            return ask.format(animal), f"A {animal} says {sound}."
        case 2:
            thing, color = rng.choice(list(THING_COLORS.items()))
            ask = rng.choice(
                ("What color is the {}?", "Which color is the {}?", "What is the color of the {}?")
            )
            return ask.format(thing), f"The {thing} is {color}."
        case 3:
            animal, legs = rng.choice(list(LEGS.items()))
            ask = rng.choice(("How many legs does a {} have?", "How many legs has a {}?"))
            return ask.format(animal), f"A {animal} has {legs} legs."
        case 4:
            animal, baby = rng.choice(list(BABIES.items()))
            ask = rng.choice(("What is a baby {} called?", "What do you call a young {}?"))
            return ask.format(animal), f"A young {animal} is called a {baby}."
        case 5 | 6 as case:
            names, what = (DAYS, "day") if case == 5 else (MONTHS, "month")
            index = rng.randrange(len(names))
            if rng.random() < 0.6:
                following = names[(index + 1) % len(names)]
                ask = rng.choice((f"Which {what} comes after {{}}?", f"What {what} is after {{}}?"))
                return ask.format(names[index]), f"After {names[index]} comes {following}."
            return (
                f"Which {what} comes before {names[index]}?",
                f"Before {names[index]} comes {names[index - 1]}.",
            )
        case 7:
            names, what = rng.choice(
                ((DAYS, "days of the week"), (MONTHS, "months"), (PLANETS, "planets"))
            )
            ask = rng.choice(("Name the {}", "List the {}", "What are the {}?", "Tell me the {}"))
            return ask.format(what), ", ".join(names) + "."
        case 8:
            language, hello = rng.choice(list(HELLO.items()))
            ask = rng.choice(
                (
                    "Say hello in {}",
                    "How do you say hello in {}?",
                    "What is hello in {}?",
                    "Translate hello to {}",
                )
            )
            return ask.format(language), f"{hello}!"
        case 9:
            language, thanks = rng.choice(list(THANKS.items()))
            ask = rng.choice(("Say thank you in {}", "How do you say thank you in {}?"))
            return ask.format(language), f"{thanks}!"
        case _:
            value = rng.randrange(len(NUMBERS))
            if rng.random() < 0.5:
                return f"Write the number {value} as a word", NUMBERS[value]
            return f"Write {NUMBERS[value]} as a number", str(value)


def fact(rng: Random) -> Turn:
    """Ask for a capital or another fact. Held out: a fact in one of its wordings."""
    if rng.random() < 0.5:
        ask, answer, _ = _capital(rng)
        return Turn("capital", ask, answer, key=ask, thought=f"I know this. {answer}")
    ask, answer = _other(rng)
    return Turn("fact", ask, answer, key=ask, thought=f"I know this. {answer}")


def unknown(rng: Random) -> Turn:
    """Ask about an invented name, so that the model learns to say that it does not know."""
    name = lexicon.pseudo_word(rng).capitalize()
    what = rng.choice(("the capital of", "the color of", "the president of", "the history of"))
    return Turn(
        "unknown",
        f"What is {what} {name}?",
        f"I do not know {what} {name}.",
        key=name,
        thought=f"I have not heard of {name}.",
    )


def _sum(rng: Random) -> tuple[int, str, int, str]:
    """Return a sum, a difference or a product: its parts, and all of it with the result."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    sign = rng.choice("++--*")
    if sign == "-" and a < b and rng.random() < 0.7:
        a, b = b, a
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return a, sign, b, f"{a} {sign} {b} = {value}"


SUM_ASKS: list[str] = _WORDS["sum_asks"]


def arithmetic(rng: Random) -> Turn:
    """Ask for a sum, a difference or a product of one-digit numbers."""
    a, sign, b, whole = _sum(rng)
    name = {"+": "plus", "-": "minus", "*": "times"}[sign]
    plain = f"{a} {sign} {b}"
    shown = rng.choice((plain, plain, f"{a}{sign}{b}", f"{a} {name} {b}"))
    ask = rng.choice(SUM_ASKS)
    answer = whole.split(" = ")[1] if "only" in ask else whole
    return Turn("arithmetic", ask.format(shown), answer, key=f"{ask} {shown}", thought=whole)


def count(rng: Random) -> Turn:
    """Ask to count: up, down, in steps."""
    step = rng.choice((1, 1, 1, 1, 2, 5, 10))
    low = rng.choice((0, 1, 1, 1, 1, rng.randint(0, 40))) if step == 1 else rng.choice((0, step))
    length = rng.choice((3, 5, 10, 10, rng.randint(3, 20), rng.randint(3, 30)))
    if step == 1 and rng.random() < 0.06:
        length = rng.choice((50, 100, rng.randint(30, 110)))
    values = [low + step * index for index in range(length)]
    down = rng.random() < 0.25
    if down:
        values.reverse()
    names = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}
    tail = names[step] if rng.random() < 0.6 or step == 1 else f" in steps of {step}"
    first, last = values[0], values[-1]
    forms = [
        f"Count from {first} to {last}{tail}",
        f"Count {first} to {last}{tail}",
        f"Please count from {first} to {last}{tail}",
        f"Can you count from {first} to {last}{tail}?",
        f"List the numbers from {first} to {last}{tail}",
        f"Count from {first} to {last}{tail}.",
    ]
    if first == 1 and step == 1:
        forms += [f"Count to {last}", f"Count up to {last}", f"Count to {last}."] * 2
    if down and step == 1:
        forms += [
            f"Count down from {first} to {last}",
            f"Count backwards from {first} to {last}",
        ] * 3
        if last == 1:
            forms += [f"Count down from {first}"] * 2
    gap, key = ", ", f"{first}-{last}-{step}"
    ask = rng.choice(forms)
    if rng.random() < 0.08:
        gap, ask = "\n", ask.rstrip(".") + ", one number per line"
    return Turn(
        "count",
        ask,
        gap.join(map(str, values)),
        key=key,
        thought=f"I start at {first} and stop at {last}.",
    )


def completion(rng: Random) -> str:
    """Return bare sentences of facts, for the completion model."""
    if rng.random() < 0.3:
        return "\n".join(_sum(rng)[3] for _ in range(rng.randint(8, 20)))
    lines = []
    for _ in range(rng.randint(1, 8)):
        roll = rng.random()
        if roll < 0.5:
            lines.append(_capital(rng)[1])
        elif roll < 0.75:
            lines.append(_other(rng)[1])
        elif roll < 0.85:
            start = rng.choice((1, 1, 1, rng.randint(0, 50)))
            lines.append(", ".join(str(start + i) for i in range(rng.randint(5, 25))))
        else:
            lines.append(_sum(rng)[3])
    return rng.choice((" ", "\n")).join(lines)
