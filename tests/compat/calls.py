"""Requests for `compat`, drawn at random: greedy, short, and the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs

#: The words of prompts and messages.
_TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "2 + 2 =",
    "def add(a, b):\n    return",
    "Write a short poem about the sea.",
    "What is the capital of Italy?",
    "Name three colours.",
    "Grüße aus Köln, naïve café ☕",
    "<|im_start|>user\nHi<|im_end|>\n",
)
_WORDS = ("the", " and", "\n", " a", "é", "Paris", ".", " of")


@attrs.frozen
class Call:
    """One request. `kind` is what it is a case of; a body of bytes is sent as it is."""

    kind: str
    method: str
    path: str
    body: Any = None

    def data(self) -> bytes | None:
        """The body as it is sent."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()

    def has(self, *fields: str) -> bool:
        """True if the body has all these fields."""
        return not fields or (isinstance(self.body, dict) and self.body.keys() >= {*fields})

    @property
    def n_outputs(self) -> int:
        """The number of outputs of a good request."""
        if not isinstance(self.body, dict):
            return 1
        prompt = self.body.get("prompt")
        texts = isinstance(prompt, list) and all(isinstance(each, str) for each in prompt)
        copies = self.body["n"] if "n" in self.body else self.body.get("n_cmpl", 1)
        return (len(prompt) if isinstance(prompt, list) and texts else 1) * int(copies)

    def __str__(self) -> str:
        data = (self.data() or b"").decode(errors="replace")
        return f"{self.method} {self.path} {data[:300]}".rstrip()


def draw(n: int, seed: int) -> Iterator[Call]:
    """Draw `n` requests. The first ones have one of each kind."""
    rng = random.Random(seed)
    kinds = [make for make, weight in _KINDS for _ in range(weight)]
    first = [make for make, _ in _KINDS]
    rng.shuffle(first)
    for i in range(n):
        make = first[i] if i < len(first) else rng.choice(kinds)
        yield make(rng)


# -- fields

_OPTIONAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("seed", (0, 1, 42, -1)),
    ("stop", ("\n", [".", " the"], ["zzz"], [])),
    ("top_k", (1, 40, 0)),
    ("top_p", (0.5, 1.0)),
    ("min_p", (0.0, 0.1)),
    ("typical_p", (1.0, 0.9)),
    ("top_n_sigma", (2.0, -1.0)),
    ("min_keep", (0, 1)),
    ("repeat_penalty", (1.0, 1.3)),
    ("repeat_last_n", (0, 16, 64)),
    ("presence_penalty", (0.0, 0.6)),
    ("frequency_penalty", (0.0, 0.6)),
    ("dry_multiplier", (0.0, 0.8)),
    ("dry_base", (0.5, 1.75)),
    ("dry_allowed_length", (2, 3)),
    ("dry_penalty_last_n", (0, 32)),
    ("dry_sequence_breakers", (["\n"], ["\n", ":"])),
    ("ignore_eos", (True, False)),
    ("logit_bias", ([[300, -1.5]], {"301": 2.0}, [[" the", False]], {"e": -3}, [])),
    ("samplers", (["top_k", "temperature"], "kt", ["penalties", "min_p", "temperature"])),
    ("n_keep", (0, 4, -1)),
    ("n_discard", (0, 8)),
    ("n_indent", (0, 2, 4)),
    ("t_max_predict_ms", (-1, 0, 60_000)),
    ("post_sampling_probs", (False,)),
    ("timings_per_token", (True, False)),
    ("return_progress", (True, False)),
    ("id_slot", (0, 1, -1)),
    ("user", ("someone", None)),
    ("grammar", ('root ::= "a" | "b"', 'root ::= [a-z]+ "."')),
)


_SCHEMAS = (
    {"type": "integer"},
    {"enum": ["yes", "no"]},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
)

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def _fields(rng: random.Random, limit: str) -> dict[str, Any]:
    """Fields that all generating routes have. Nothing depends on what a cache holds."""
    chosen = {name: rng.choice(values) for name, values in rng.sample(_OPTIONAL, rng.randint(0, 6))}
    chosen |= {"temperature": 0, "cache_prompt": False, limit: rng.choice((1, 2, 5, 12, 24))}
    if rng.random() < 0.4:
        chosen["stream"] = True
        if rng.random() < 0.5:
            chosen["stream_options"] = {"include_usage": rng.random() < 0.7}
    return chosen


def _prompt(rng: random.Random) -> Any:
    text, other = rng.sample(_TEXTS, 2)
    tokens = [rng.randrange(300, 900) for _ in range(rng.randint(1, 8))]
    mixed = [text, rng.randrange(300, 900), other]
    return rng.choice((text, text, text, tokens, mixed, [text, other], {"prompt_string": text}))


def _messages(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": "Be brief."})
    for _ in range(rng.choice((0, 0, 1))):
        messages.append({"role": "user", "content": rng.choice(_TEXTS)})
        messages.append({"role": "assistant", "content": "Yes."})
    text = rng.choice(_TEXTS)
    parts = [{"type": "text", "text": text}]
    messages.append({"role": "user", "content": rng.choice((text, parts))})
    if rng.random() < 0.1:
        messages.append({"role": "assistant", "content": "Well, the"})
    return messages


# -- the routes


def _completion(rng: random.Random) -> Call:
    body = {"prompt": _prompt(rng)} | _fields(rng, rng.choice(("n_predict", "max_tokens")))
    if rng.random() < 0.3:
        body["n_probs"] = rng.choice((1, 3))
    if rng.random() < 0.2:
        body["n_cmpl"] = 2
    if rng.random() < 0.3:
        body["return_tokens"] = True
    if rng.random() < 0.2:
        body["response_fields"] = ["content", "generation_settings/top_k", "no/such", "stop_type"]
    if rng.random() < 0.15:
        body.pop("grammar", None)
        body["json_schema"] = rng.choice(_SCHEMAS)
    return Call("completion", "POST", rng.choice(("/completion", "/completions")), body)


def _oai_completion(rng: random.Random) -> Call:
    body = {"prompt": _prompt(rng), "model": "any"} | _fields(rng, "max_tokens")
    if rng.random() < 0.3:
        body["logprobs"] = rng.choice((1, 2))
    if rng.random() < 0.2:
        body["n"] = 2
    return Call("v1/completions", "POST", "/v1/completions", body)


def _chat(rng: random.Random) -> Call:
    limit = rng.choice(("max_tokens", "max_completion_tokens", "n_predict"))
    body = {"messages": _messages(rng), "model": "any"} | _fields(rng, limit)
    if rng.random() < 0.3:
        body["logprobs"] = True
        if rng.random() < 0.7:
            body["top_logprobs"] = rng.choice((1, 3))
    if rng.random() < 0.2:
        body["n"] = 2
    if rng.random() < 0.15:
        body.pop("grammar", None)
        schema = {"name": "s", "schema": rng.choice(_SCHEMAS)}
        body["response_format"] = rng.choice(
            ({"type": "text"}, {"type": "json_schema", "json_schema": schema})
        )
    elif rng.random() < 0.2:
        body.pop("grammar", None)
        body["tools"] = [_TOOL]
        body["tool_choice"] = rng.choice(("auto", "none"))
    if rng.random() < 0.3:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    elif rng.random() < 0.3:
        body["reasoning_format"] = rng.choice(("none", "deepseek", "auto"))
    path = rng.choice(("/v1/chat/completions", "/chat/completions"))
    return Call("chat", "POST", path, body)


def _infill(rng: random.Random) -> Call:
    body = _fields(rng, "n_predict") | {
        "input_prefix": rng.choice(("def f(x):\n    ", "The cat ", ["a", 300, "b"])),
        "input_suffix": rng.choice(("\n    return y", " the mat.", "")),
    }
    if rng.random() < 0.4:
        body["input_extra"] = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y = 2\n"}]
    if rng.random() < 0.4:
        body["prompt"] = "y = "
    return Call("infill", "POST", "/infill", body)


def _tokenize(rng: random.Random) -> Call:
    text = rng.choice(_TEXTS)
    body: dict[str, Any] = {"content": rng.choice((text, [text, 300, "b"], ""))}
    for name in ("add_special", "parse_special", "with_pieces"):
        if rng.random() < 0.4:
            body[name] = rng.random() < 0.5
    return Call("tokenize", "POST", "/tokenize", body if rng.random() < 0.95 else {})


def _detokenize(rng: random.Random) -> Call:
    tokens = [rng.randrange(0, 900) for _ in range(rng.randint(0, 12))]
    return Call("detokenize", "POST", "/detokenize", {"tokens": tokens})


def _template(rng: random.Random) -> Call:
    body: dict[str, Any] = {"messages": _messages(rng)}
    if rng.random() < 0.3:
        body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
    if rng.random() < 0.3:
        body["tools"] = [_TOOL]
    return Call("apply-template", "POST", "/apply-template", body)


def _count(rng: random.Random) -> Call:
    path = rng.choice(("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"))
    return Call("input_tokens", "POST", path, {"messages": _messages(rng)})


def _get(rng: random.Random) -> Call:
    paths = ("/v1/models", "/models", "/props", "/health", "/v1/health")
    path = rng.choice(paths)
    return Call(path.removeprefix("/v1"), "GET", path)


# -- what is wrong

_BAD_FIELDS: tuple[tuple[str, Any], ...] = (
    ("temperature", "hot"),
    ("n_predict", -5),
    ("n_predict", "many"),
    ("top_k", [1]),
    ("seed", "x"),
    ("stream", "yes"),
    ("n_cmpl", 1000),
    ("n_keep", -7),
    ("n_indent", -1),
    ("min_keep", -1),
    ("repeat_last_n", -2),
    ("adaptive_decay", 2),
    ("dry_sequence_breakers", []),
    ("cache_prompt", 1),
    ("response_fields", 5),
    ("grammar", "root ::= ("),
    ("json_schema", {"type": "nonsense"}),
    ("id_slot", 1000),
)

_BAD_CHATS: tuple[tuple[str, Any], ...] = (
    ("no messages", {}),
    ("messages are text", {"messages": "Hi"}),
    ("no content", {"messages": [{"role": "user"}]}),
    ("no role", {"messages": [{"content": "Hi"}]}),
    ("content is a number", {"messages": [{"role": "user", "content": 5}]}),
    ("unknown part", {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}),
    ("an image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (
        "two prefills",
        {
            "messages": [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"},
            ]
        },
    ),
    ("top_logprobs alone", {"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2}),
    (
        "bad response_format",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {"type": "yaml"},
        },
    ),
)


def _nothing(rng: random.Random) -> Call:
    body = {"prompt": rng.choice(_TEXTS), "n_predict": 0, "temperature": 0, "cache_prompt": False}
    return Call("no tokens wanted", "POST", "/completion", body)


def _bad_field(rng: random.Random) -> Call:
    name, value = rng.choice(_BAD_FIELDS)
    path = rng.choice(("/completion", "/v1/completions", "/v1/chat/completions"))
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0} | {name: value}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        body["prompt"] = "The"
    return Call(f"bad {name}", "POST", path, body)


def _bad_chat(rng: random.Random) -> Call:
    kind, body = rng.choice(_BAD_CHATS)
    path = rng.choice(("/v1/chat/completions", "/apply-template"))
    if path == "/apply-template" and kind in ("top_logprobs alone", "bad response_format"):
        path = "/v1/chat/completions"  # the other has no use for these
    return Call(kind, "POST", path, body | {"max_tokens": 2, "temperature": 0})


def _bad_prompt(rng: random.Random) -> Call:
    kind, prompt = rng.choice(
        (
            ("empty prompt", ""),
            ("no prompts", []),
            ("prompt is a number", 5),
            ("unknown token", [10**8]),
            ("prompt too long", "word " * 5000),
        )
    )
    path = rng.choice(("/completion", "/v1/completions"))
    return Call(kind, "POST", path, {"prompt": prompt, "n_predict": 2, "temperature": 0})


def _bad_body(rng: random.Random) -> Call:
    kind, body = rng.choice(
        (
            ("not JSON", b'{"prompt": "The", bad'),
            ("not an object", b"[1]"),
            ("no body", b""),
            ("not UTF-8", b'{"prompt": "\xff"}'),
            ("no prompt", b"{}"),
        )
    )
    return Call(kind, "POST", rng.choice(("/completion", "/v1/completions")), body)


def _bad_route(rng: random.Random) -> Call:
    kind, method, path = rng.choice(
        (
            ("unknown route", "GET", "/v1/nothing"),
            ("unknown route", "POST", "/nothing/here"),
            ("wrong method", "GET", "/completion"),
            ("wrong method", "DELETE", "/v1/models"),
            ("wrong method", "PUT", "/v1/chat/completions"),
        )
    )
    return Call(kind, method, path, {} if method in ("POST", "PUT") else None)


_KINDS: tuple[tuple[Callable[[random.Random], Call], int], ...] = (
    (_completion, 12),
    (_oai_completion, 8),
    (_chat, 12),
    (_infill, 4),
    (_tokenize, 3),
    (_detokenize, 2),
    (_template, 3),
    (_count, 2),
    (_get, 3),
    (_nothing, 1),
    (_bad_field, 4),
    (_bad_chat, 3),
    (_bad_prompt, 2),
    (_bad_body, 2),
    (_bad_route, 2),
)
