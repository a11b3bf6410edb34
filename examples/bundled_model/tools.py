"""Tool calls: functions, questions that need one, results, and answers from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.bundled_model import lexicon
from examples.bundled_model.document import Turn, is_held_out
from examples.bundled_model.functions import FUNCTIONS, Function, random_function

Json = dict[str, Any]


@dataclass(frozen=True)
class Chosen:
    """A function with its names settled, and its description as JSON."""

    function: Function
    name: str
    keys: tuple[str, ...]
    schema: Json


def choose(rng: Random, function: Function) -> Chosen:
    """Settle the names of a function and describe it."""
    name = rng.choice(function.names)
    keys: list[str] = []
    properties: Json = {}
    for parameter in function.parameters:
        key = rng.choice(parameter.names)
        while key in properties:
            key = key + "2"
        keys.append(key)
        properties[key] = {"type": parameter.kind}
        if rng.random() < 0.5:
            properties[key]["description"] = parameter.text
    body: Json = {"name": name, "description": function.text}
    if rng.random() < 0.1:
        del body["description"]
    body["parameters"] = {"type": "object", "properties": properties}
    if rng.random() < 0.6:
        body["parameters"]["required"] = keys
    if rng.random() < 0.1:
        body["parameters"]["additionalProperties"] = False
    schema: Json = {"type": "function", "function": body}
    if rng.random() < 0.15:
        schema = json.loads(json.dumps(schema, sort_keys=True))
    return Chosen(function, name, tuple(keys), schema)


def call(rng: Random, chosen: Chosen) -> tuple[str, Json]:
    """Return a question that needs the function, and the call that answers it."""
    values = [parameter.make(rng) for parameter in chosen.function.parameters]
    ask = rng.choice(chosen.function.asks).format(*values)
    function = {"name": chosen.name, "arguments": dict(zip(chosen.keys, values, strict=True))}
    return ask, {"type": "function", "function": function}


def result(rng: Random, name: str) -> tuple[str, str]:
    """Return what a function gave back, and the answer made from it."""
    roll = rng.random()
    if "weather" in name or roll < 0.35:
        names: list[tuple[str, Any]] = [
            ("temperature", rng.randint(-20, 40)),
            ("sky", rng.choice(("sunny", "cloudy", "clear"))),
            ("wind", rng.choice(("weak", "strong", 12, 30))),
            ("price", lexicon.number(rng)),
            ("status", rng.choice(("ok", "done", "failed", "sent"))),
            ("name", lexicon.first_name(rng)),
            ("condition", rng.choice(("rain", "snow", "sunny", "fog"))),
            ("count", lexicon.number(rng)),
            (rng.choice(lexicon.NOUNS), lexicon.token_like(rng)),
        ]
        fields = dict(rng.sample(names, rng.choice((1, 2, 2, 3))))
        said = [f"the {key} is {value}" for key, value in fields.items()]
        text = said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]
        return json.dumps(fields, ensure_ascii=False), text[0].upper() + text[1:] + "."
    if roll < 0.65:
        value = rng.choice((lexicon.numeral, lexicon.token_like, lexicon.word))(rng)
        return value, f"The result is {value}."
    if roll < 0.75:
        value = rng.choice((lexicon.numeral, lexicon.word))(rng)
        return json.dumps({"result": value}), f"The result is {value}."
    text = lexicon.sentence(rng)
    return text, text


def tool_conversation(
    rng: Random, plain: Callable[[Random], Turn]
) -> tuple[str, list[Json], list[Json], bool]:
    """Return kind, tools, messages and whether the values are held out."""
    functions = [
        random_function(rng) if rng.random() < 0.5 else rng.choice(FUNCTIONS)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
    ]
    distinct = {function.text: function for function in functions}
    chosen = [choose(rng, function) for function in distinct.values()]
    tools = [item.schema for item in chosen]
    if rng.random() < 0.2:
        turn = plain(rng)
        messages = [
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": turn.answer, "thought": turn.thought},
        ]
        return "tools unused", tools, messages, turn.held_out
    target = rng.choice(chosen)
    ask, made = call(rng, target)
    held = is_held_out("tool call", json.dumps(made["function"]))
    calls = [made]
    if rng.random() < 0.06 and len(target.keys) == 1:
        ask2, second = call(rng, target)
        ask, calls = f"{ask.rstrip('.?')} and {ask2[0].lower()}{ask2[1:]}", [made, second]
    thought = f"The function {target.name} fits."
    messages = [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": "", "tool_calls": calls, "thought": thought},
    ]
    if rng.random() < 0.55:
        return "tool call", tools, messages, held
    said = []
    for _ in calls:
        content, answer = result(rng, target.name)
        messages.append({"role": "tool", "content": content})
        said.append(answer)
    messages.append(
        {"role": "assistant", "content": " ".join(said), "thought": "The function has answered."}
    )
    return "tool result", tools, messages, held
