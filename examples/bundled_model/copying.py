"""Tasks whose answer is in the prompt: repeating, recalling, looking up."""

from __future__ import annotations

from random import Random

from examples.bundled_model import lexicon
from examples.bundled_model.document import Turn
from examples.bundled_model.words import table

_WORDS = table("copying")

REPEAT: list[str] = _WORDS["repeat"]
TIMES: list[tuple[int, str]] = _WORDS["times"]
ACKNOWLEDGE = ("Okay.", "Okay, I will remember that.", "Thanks for telling me.", "Noted.")


def repeat(rng: Random) -> Turn:
    """Ask for a phrase back."""
    text = lexicon.phrase(rng)
    return Turn(
        "repeat",
        rng.choice(REPEAT).format(text),
        text,
        key=text,
        thought=f"I have to write: {text}",
    )


def repeat_times(rng: Random) -> Turn:
    """Ask for a short phrase several times."""
    text = rng.choice((lexicon.word, lexicon.word, lexicon.token_like))(rng)
    if rng.random() < 0.1:
        text = rng.choice(lexicon.COMMON)
    if rng.random() < 0.2:
        text += " " + lexicon.word(rng)
    count, name = rng.choice(TIMES)
    verb = rng.choice(("Say", "Write", "Repeat", "Print"))
    form = rng.choice(("{v} {t} {n}", '{v} "{t}" {n}.', "{v} the word {t} {n}", "{v} {n}: {t}"))
    return Turn(
        "repeat times",
        form.format(v=verb, t=text, n=name),
        " ".join([text] * count),
        key=text,
        thought=f"I write {text} {count} times.",
    )


def introduction(rng: Random) -> tuple[Turn, Turn]:
    """Have the user tell something, and ask for it later."""
    name, place = lexicon.full_name(rng), lexicon.city(rng)
    hobby, food = rng.choice(lexicon.HOBBIES), rng.choice(lexicon.FOODS)
    color, animal = rng.choice(lexicon.COLORS), rng.choice(lexicon.ANIMALS)
    age, thing = rng.randint(5, 99), rng.choice(lexicon.NOUNS)
    code, pet = lexicon.token_like(rng), lexicon.first_name(rng)
    name_tell = (
        "My name is {}.",
        "I am {}.",
        "Hi, I'm {}.",
        "Hello, my name is {}.",
        "Call me {}.",
        "Hi! My name is {}.",
        "I'm {}",
    )
    name_ask = (
        "What is my name?",
        "What's my name?",
        "Who am I?",
        "Do you know my name?",
        "Do you remember my name?",
        "Tell me my name.",
    )
    kinds: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str, str], ...] = (
        (name, name_tell, name_ask, "Nice to meet you, {}!", "Your name is {}."),
        (name, name_tell, name_ask, "Hello, {}!", "Your name is {}."),
        (name, name_tell, name_ask, "Hello {}, how can I help you?", "Your name is {}."),
        (
            place,
            ("I live in {}.", "I am from {}.", "My home is in {}."),
            ("Where do I live?", "Where am I from?", "Which city do I live in?"),
            "{} is a nice place.",
            "You live in {}.",
        ),
        (
            str(age),
            ("I am {} years old.", "My age is {}."),
            ("How old am I?", "What is my age?"),
            "You are {}. Good to know!",
            "You are {} years old.",
        ),
        (
            hobby,
            ("I like {}.", "My hobby is {}."),
            ("What do I like?", "What is my hobby?"),
            "I think {} is fun.",
            "You like {}.",
        ),
        (
            food,
            ("My favorite food is {}.",),
            ("What is my favorite food?", "What do I like to eat?"),
            "I hear that {} is tasty.",
            "Your favorite food is {}.",
        ),
        (
            color,
            ("My favorite color is {}.",),
            ("What is my favorite color?",),
            "A good choice: {}.",
            "Your favorite color is {}.",
        ),
        (
            code,
            (
                "The secret word is {}.",
                "The password is {}.",
                "Remember this code: {}",
                "Remember: {}",
                "My code is {}.",
            ),
            (
                "What is the secret word?",
                "What was the code?",
                "What did I tell you to remember?",
                "What is the password?",
            ),
            "Okay, I will remember {}.",
            "It is {}.",
        ),
        (
            pet,
            (f"I have a {animal}. Its name is {{}}.", f"My {animal} is called {{}}."),
            (f"What is the name of my {animal}?", f"What is my {animal} called?"),
            "Say hello to {} from me!",
            f"Your {animal} is called {{}}.",
        ),
        (
            code,
            (f"The {thing} has number {{}}.", f"My {thing} is {{}}."),
            (f"What number does the {thing} have?", f"Which is my {thing}?"),
            "Okay.",
            "It is {}.",
        ),
    )
    value, tells, asks, reply, answer = rng.choice(kinds)
    reply = reply if rng.random() < 0.8 else rng.choice(ACKNOWLEDGE)
    tell = Turn(
        "tell",
        rng.choice(tells).format(value),
        reply.format(value),
        key=value,
        thought="The user tells me something. I remember it.",
    )
    ask = Turn(
        "recall",
        rng.choice(asks),
        answer.format(value),
        key=value,
        thought=f"The user told me: {value}",
    )
    return tell, ask


def lookup(rng: Random) -> Turn:
    """Ask for one entry of a short list."""
    count = rng.randint(2, 6)
    people = list({lexicon.first_name(rng): None for _ in range(count)})
    thing = rng.choice(("age", "city", "code", "color", "room", "job", "number"))

    def value() -> str:
        if thing == "age":
            return str(rng.randint(1, 99))
        if thing == "city":
            return lexicon.city(rng)
        if thing == "color":
            return rng.choice(lexicon.COLORS)
        if thing in ("room", "number"):
            return str(lexicon.number(rng))
        return lexicon.pseudo_word(rng) if thing == "job" else lexicon.token_like(rng)

    values = {person: value() for person in people}
    who = rng.choice(people)
    form = rng.choice(
        ("{}: {}", "- {}: {}", "The {thing} of {} is {}.", "{} = {}", "{}'s {thing} is {}.")
    )
    gap = " " if form.endswith(".") and rng.random() < 0.5 else "\n"
    text = gap.join(form.format(name, item, thing=thing) for name, item in values.items())
    question = rng.choice((f"What is the {thing} of {who}?", f"What is {who}'s {thing}?"))
    prompt = f"{text}\n{question}" if rng.random() < 0.75 else f"{question}\n{text}"
    return Turn(
        "lookup",
        prompt,
        f"The {thing} of {who} is {values[who]}.",
        key=who + values[who],
        thought=f"{who}: {values[who]}",
    )


def listing(rng: Random) -> Turn:
    """Ask for given words in another layout."""
    items = [
        rng.choice((lexicon.word, lexicon.word, lexicon.token_like, lexicon.first_name))(rng)
        for _ in range(rng.randint(2, 6))
    ]
    given = ", ".join(items) if rng.random() < 0.7 else ", ".join(items[:-1]) + " and " + items[-1]
    match rng.randint(0, 3):
        case 0:
            ask, answer = "Make a list of", "\n".join(f"- {item}" for item in items)
        case 1:
            ask, answer = (
                "Make a numbered list of",
                "\n".join(f"{index}. {item}" for index, item in enumerate(items, 1)),
            )
        case 2:
            ask, answer = "What is the first of these:", items[0]
        case _:
            ask, answer = "What is the last of these:", items[-1]
    return Turn("list", f"{ask} {given}", answer, key=given, thought=f"The items are {given}.")


def drill(rng: Random) -> str:
    """Return bare text in which a run of words comes again, for the completion model."""
    count = rng.randint(4, 24)
    maker = rng.choice((lexicon.word, lexicon.token_like, lexicon.phrase, lexicon.first_name))
    items = [maker(rng) for _ in range(count)]
    gap = rng.choice((" ", " ", "\n", ", ", " | "))
    text = gap.join(items)
    again = gap.join(items[rng.randrange(count // 2) :])
    return text + rng.choice(("\n", "\n\n", "\n---\n")) + (text if rng.random() < 0.6 else again)
