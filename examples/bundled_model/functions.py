"""The functions that the corpus has tools for: known ones, and made-up ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.bundled_model import lexicon

Maker = Callable[[Random], Any]


@dataclass(frozen=True)
class Parameter:
    """One argument of a function, under one of several names."""

    names: tuple[str, ...]
    kind: str
    text: str
    make: Maker


@dataclass(frozen=True)
class Function:
    """A function, how it may be called in the list, and what a user says to need it."""

    names: tuple[str, ...]
    text: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]


def _words(rng: Random) -> str:
    return " ".join(lexicon.word(rng) for _ in range(rng.randint(1, 3)))


def _email(rng: Random) -> str:
    return f"{lexicon.first_name(rng).lower()}@example.{rng.choice(('com', 'org', 'net'))}"


def _path(rng: Random) -> str:
    folder, ending = rng.choice(("", "/tmp/", "/home/", "src/")), rng.choice(("txt", "py", "md"))
    return f"{folder}{lexicon.word(rng)}.{ending}"


def _small(rng: Random) -> int:
    return rng.randint(1, 999)


def _expression(rng: Random) -> str:
    return f"{_small(rng)} {rng.choice('+-*/')} {_small(rng)}"


CITY = Parameter(
    ("city", "city", "location", "place", "town"), "string", "Name of the city", lexicon.city
)
FUNCTIONS = (
    Function(
        ("get_weather", "get_weather", "get_current_weather", "weather", "weather_lookup"),
        "Get the weather for a city",
        (CITY,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "What's the weather like in {0}?",
            "Weather in {0}?",
            "Is it raining in {0}?",
            "Tell me the weather in {0}.",
            "Check the weather in {0}",
            "What is the weather like in {0} today?",
        ),
    ),
    Function(
        ("get_time", "current_time", "get_current_time"),
        "Get the time in a city",
        (CITY,),
        ("What time is it in {0}?", "Tell me the time in {0}", "What is the time in {0}?"),
    ),
    Function(
        ("search", "web_search", "search_web", "lookup"),
        "Search the web",
        (Parameter(("query", "q", "text", "term"), "string", "What to search for", _words),),
        ("Search for {0}", "Search the web for {0}", "Look up {0}", "Find pages about {0}"),
    ),
    Function(
        ("add", "add_numbers", "sum"),
        "Add two numbers",
        (
            Parameter(("a", "x", "first"), "integer", "First number", _small),
            Parameter(("b", "y", "second"), "integer", "Second number", _small),
        ),
        ("Add {0} and {1}", "What is {0} + {1}?", "What is {0} plus {1}?", "Sum {0} and {1}"),
    ),
    Function(
        ("multiply", "multiply_numbers", "product"),
        "Multiply two numbers",
        (
            Parameter(("a", "x", "first"), "integer", "First number", _small),
            Parameter(("b", "y", "second"), "integer", "Second number", _small),
        ),
        (
            "Multiply {0} and {1}",
            "What is {0} * {1}?",
            "What is {0} times {1}?",
            "Multiply {0} by {1}",
        ),
    ),
    Function(
        ("calculate", "calculator", "evaluate"),
        "Calculate an expression",
        (Parameter(("expression", "formula"), "string", "The expression", _expression),),
        ("Calculate {0}", "What is {0}?", "Compute {0}", "Evaluate {0}"),
    ),
    Function(
        ("send_email", "email", "send_mail"),
        "Send an email",
        (
            Parameter(("to", "recipient", "address"), "string", "Who gets it", _email),
            Parameter(("subject", "title"), "string", "The subject", _words),
        ),
        (
            "Send an email to {0} with the subject {1}",
            "Email {0} about {1}",
            "Write to {0} about {1}",
        ),
    ),
    Function(
        ("translate", "translate_text"),
        "Translate a text",
        (
            Parameter(("text", "phrase"), "string", "The text", _words),
            Parameter(
                ("language", "target"),
                "string",
                "The language",
                lambda rng: rng.choice(
                    ("French", "German", "Spanish", "Italian", "Japanese", "Dutch")
                ),
            ),
        ),
        ("Translate {0} to {1}", "Translate {0} into {1}", 'Translate "{0}" to {1}'),
    ),
    Function(
        ("set_timer", "start_timer", "timer"),
        "Start a timer",
        (Parameter(("minutes", "duration", "length"), "integer", "How many minutes", _small),),
        (
            "Set a timer for {0} minutes",
            "Start a timer of {0} minutes",
            "Timer for {0} minutes please",
        ),
    ),
    Function(
        ("create_reminder", "remind", "add_reminder"),
        "Create a reminder",
        (
            Parameter(("text", "task", "title"), "string", "What to remember", _words),
            Parameter(
                ("time", "at", "when"),
                "string",
                "When",
                lambda rng: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
            ),
        ),
        (
            "Remind me of {0} at {1}",
            "Create a reminder for {0} at {1}",
            "Set a reminder: {0} at {1}",
        ),
    ),
    Function(
        ("play_music", "play_song", "play"),
        "Play a song",
        (Parameter(("song", "title", "name"), "string", "The song", _words),),
        ("Play {0}", "Play the song {0}", "I want to hear {0}"),
    ),
    Function(
        ("get_stock_price", "stock_price", "get_price"),
        "Get the price of a stock",
        (
            Parameter(
                ("symbol", "ticker", "stock"),
                "string",
                "The stock's symbol",
                lambda rng: "".join(
                    rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4))
                ),
            ),
        ),
        ("What is the price of {0}?", "What is the stock price of {0}?", "How much is {0} stock?"),
    ),
    Function(
        ("read_file", "open_file", "cat"),
        "Read a file",
        (Parameter(("path", "file", "filename"), "string", "Path of the file", _path),),
        ("Read the file {0}", "Show me {0}", "What is in {0}?", "Open {0}"),
    ),
    Function(
        ("find_restaurant", "search_restaurants"),
        "Find a restaurant",
        (
            CITY,
            Parameter(
                ("food", "cuisine", "dish"),
                "string",
                "Kind of food",
                lambda rng: rng.choice(lexicon.FOODS),
            ),
        ),
        (
            "Find a restaurant in {0} with {1}",
            "Where can I eat in {0}? I want {1}.",
            "Find a place in {0} that has {1}",
        ),
    ),
    Function(
        ("book_flight", "find_flight", "search_flights"),
        "Find a flight",
        (
            Parameter(("from", "origin", "start"), "string", "Where it starts", lexicon.city),
            Parameter(("to", "destination", "end"), "string", "Where it goes", lexicon.city),
        ),
        (
            "Find a flight from {0} to {1}",
            "Book a flight from {0} to {1}",
            "I want to fly from {0} to {1}",
        ),
    ),
    Function(
        ("roll_dice", "roll", "throw_dice"),
        "Roll dice",
        (
            Parameter(
                ("count", "number", "dice"),
                "integer",
                "How many dice",
                lambda rng: rng.randint(1, 20),
            ),
        ),
        ("Roll {0} dice", "Throw {0} dice", "Please roll {0} dice"),
    ),
)


def random_function(rng: Random) -> Function:
    """Make up a function, so that names have to be read and cannot be known."""
    noun = lexicon.pseudo_word(rng, 2, 3) if rng.random() < 0.5 else rng.choice(lexicon.NOUNS)
    verb = rng.choice(
        ("get", "find", "check", "open", "start", "stop", "update", "delete", "show", "count")
    )
    name = rng.choice(
        (f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}", f"{verb}-{noun}")
    )
    makers: tuple[tuple[str, Maker], ...] = (
        ("string", lexicon.pseudo_word),
        ("string", lexicon.first_name),
        ("string", lexicon.city),
        ("string", lexicon.word),
        ("integer", lexicon.number),
        ("string", lexicon.letters),
    )
    parameters = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
        key = lexicon.pseudo_word(rng, 1, 2) if rng.random() < 0.4 else rng.choice(lexicon.NOUNS)
        kind, make = rng.choice(makers)
        parameters.append(Parameter((key,), kind, f"The {key}", make))
    ask = f"{verb.capitalize()} the {noun}"
    if len(parameters) == 1:
        forms = (
            f"{ask} for {{0}}",
            f"{ask} of {{0}}",
            f"{ask} {{0}}",
            f"{ask} with {parameters[0].names[0]} {{0}}",
        )
        ask = rng.choice(forms)
    elif parameters:
        ask += f" with {parameters[0].names[0]} {{0}} and {parameters[1].names[0]} {{1}}"
    return Function((name,), f"{verb.capitalize()} the {noun}", tuple(parameters), (ask, ask + "."))
