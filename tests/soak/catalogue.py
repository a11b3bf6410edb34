"""The requests of the soak test: to every route, with random prompts and random fields."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import attrs

KEYS = ("soak-a", "soak-b")

#: Bytes that the server takes as a body at most: `--max-body-size`.
MAX_BODY = 2**20

_WORDS = """
    Once upon a time there was little cat who liked to play with her red ball in the big garden One
    day she saw bird and said hello do you want to be my friend
""".split()  # noqa: SIM905 - a list would be a page long

#: The beginning of many prompts, so that some of each is in the cache.
_SHARED = "You are a friendly teller of stories for children. " * 4

_TOOL = {
    "name": "weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@attrs.frozen(kw_only=True)
class Ask:
    """One request.

    `head` is how many bytes of `data` are its head, `allowed` what it may get as a status, and
    `end` what a streamed answer has to end with.
    """

    name: str
    data: bytes
    head: int
    allowed: frozenset[int] = frozenset({200})
    end: bytes = b""

    @property
    def has_body(self) -> bool:
        """True if anything follows the head."""
        return len(self.data) > self.head


def request(
    method: str, path: str, body: object = None, *headers: str, key: str = KEYS[0]
) -> tuple[bytes, int]:
    """Write a request. Returns its bytes, and how many of them are its head."""
    content = body if isinstance(body, bytes) else b"" if body is None else _json(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += [f"Content-Length: {len(content)}"] if content or method == "POST" else []
    head = "\r\n".join([*lines, "", ""]).encode()
    return head + content, len(head)


def _json(body: object) -> bytes:
    return json.dumps(body).encode()


def text(source: random.Random, most: int = 60) -> str:
    """Some words."""
    words = " ".join(source.choices(_WORDS, k=source.randint(1, most)))
    return _SHARED + words if source.random() < 0.4 else words


def _common(source: random.Random) -> dict[str, Any]:
    """Fields of every route that generates text."""
    fields: dict[str, Any] = {"temperature": source.choice((0, 0.8, 1.5))}
    if source.random() < 0.3:
        fields["priority"] = source.randint(-5, 0)
    if source.random() < 0.2:
        fields["seed"] = source.randrange(2**31)
    if source.random() < 0.2:
        fields["repeat_penalty"] = 1.1
    return fields


def _messages(source: random.Random) -> list[dict[str, Any]]:
    messages = []
    for _ in range(source.randint(0, 2)):
        messages.append({"role": "user", "content": text(source)})
        messages.append({"role": "assistant", "content": text(source, 20)})
    return [*messages, {"role": "user", "content": text(source)}]


def chat_body(source: random.Random) -> dict[str, Any]:
    """The body of a chat, with some of what a chat may have."""
    body = _common(source) | {
        "messages": _messages(source),
        "max_tokens": source.choice((1, 16, 64)),
    }
    return body | source.choice(
        (
            {},
            {},
            {"n": 2},
            {"logprobs": True, "top_logprobs": 3},
            {"stop": ["the", "\n\n"]},
            {"tools": [{"type": "function", "function": _TOOL}]},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        )
    )


def draw_greedy(source: random.Random, kind: int) -> tuple[str, dict[str, Any]]:
    """Draw a path and a body of a greedy request, about what the bundled model knows."""
    asked = source.choice(_KNOWN).format(*(source.randint(1, 9) for _ in range(2)))
    messages = [*_messages(source)[:-1], {"role": "user", "content": asked}]
    chat = {"messages": messages, "max_tokens": source.choice((8, 24, 48))}
    tools = {"tools": [{"type": "function", "function": _FIXED}], "tool_choice": "required"}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    path, body = (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"n": 2}),
        ("/v1/chat/completions", chat | {"response_format": schema}),
        ("/v1/chat/completions", chat | tools),
        ("/v1/responses", {"input": asked, "max_output_tokens": 32}),
        ("/v1/messages", {"messages": messages, "max_tokens": 24}),
        ("/v1/completions", {"prompt": asked, "max_tokens": 16}),
        ("/completion", {"prompt": asked, "n_predict": 16}),
    )[kind]
    return path, {**body, "temperature": 0}


#: Kinds of greedy requests.
N_GREEDY = 8

#: There are no probabilities of a call's arguments, so they leave no choice.
_FIXED = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "const": "Rome"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

_KNOWN = (
    "Count from {} to 1{}",
    "What is {} plus {}?",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Thank you, {}{}",
    "Tell me a story.",
    "What is the weather in Rome? {}",
    "Repeat: the cat {} and the dog {}.",
)


def _completion(source: random.Random) -> dict[str, Any]:
    prompt = source.choice((text(source), [3, 4, 5], [text(source, 9), text(source, 9)]))
    return _common(source) | {"prompt": prompt, "n_predict": source.choice((1, 16, 64))}


def _llama(source: random.Random) -> dict[str, Any]:
    return _completion(source) | source.choice(({}, {"n_probs": 5}, {"grammar": 'root ::= "a"+'}))


def _responses(source: random.Random) -> dict[str, Any]:
    more = source.choice(({}, {"instructions": text(source)}, {"tools": [_TOOL | _FUNCTION]}))
    return _common(source) | {"input": text(source), "max_output_tokens": 32} | more


_FUNCTION = {"type": "function"}


def _anthropic(source: random.Random) -> dict[str, Any]:
    return _common(source) | {"messages": _messages(source), "max_tokens": 32}


def _ollama(source: random.Random) -> dict[str, Any]:
    options = {"num_predict": 32, "stop": ["\n\n"]}
    return _common(source) | {"messages": _messages(source), "stream": False, "options": options}


def _infill(source: random.Random) -> dict[str, Any]:
    gap = {"input_prefix": text(source), "input_suffix": text(source), "n_predict": 16}
    return _common(source) | gap


def _tokens(source: random.Random) -> dict[str, Any]:
    return {"content": text(source) * source.choice((1, 1, 50)), "with_pieces": True}


def _file(source: random.Random) -> dict[str, Any]:
    return {"filename": f"slot-{source.randrange(4)}.bin"}


@attrs.frozen
class _Route:
    """A route that generates text, both whole and streamed."""

    weight: int
    path: str
    body: Callable[[random.Random], dict[str, Any]]
    end: bytes  # of a stream


_GENERATING = (
    _Route(8, "/v1/chat/completions", chat_body, b"[DONE]"),
    _Route(4, "/v1/completions", _completion, b"[DONE]"),
    _Route(4, "/completion", _llama, b'"stop":true'),
    _Route(4, "/v1/responses", _responses, b"event: response."),
    _Route(4, "/v1/messages", _anthropic, b"message_stop"),
    _Route(2, "/api/chat", _ollama, b'"done":true'),
    _Route(2, "/infill", _infill, b'"stop":true'),
)

#: Routes that do not generate: weight, method, path, body, what may come back.
_OTHERS: tuple[tuple[int, str, str, Callable[[random.Random], Any] | None, set[int]], ...] = (
    (3, "POST", "/tokenize", _tokens, {200}),
    (2, "POST", "/detokenize", lambda source: {"tokens": [3, 4, 5]}, {200}),
    (2, "POST", "/apply-template", chat_body, {200}),
    (1, "POST", "/v1/messages/count_tokens", _anthropic, {200}),
    (1, "POST", "/v1/chat/completions/input_tokens", chat_body, {200}),
    (1, "GET", "/v1/models", None, {200}),
    (1, "GET", "/api/tags", None, {200}),
    (1, "GET", "/api/ps", None, {200}),
    (1, "GET", "/props", None, {200}),
    (1, "POST", "/props", lambda source: {}, {200}),
    (2, "GET", "/slots", None, {200}),
    (1, "GET", "/slots?fail_on_no_slot=1&queue=1", None, {200, 503}),
    # 403: what the slot or the file holds is the other key's.
    (1, "POST", "/slots/{slot}?action=save", _file, {200, 403}),
    # 400: the file is not there yet, or the cache is full.
    (1, "POST", "/slots/{slot}?action=restore", _file, {200, 400, 403}),
    (1, "POST", "/slots/{slot}?action=erase", None, {200, 403}),
    (2, "GET", "/metrics", None, {200}),
    (1, "GET", "/health", None, {200}),
    (1, "GET", "/health/ready", None, {200}),
    (1, "GET", "/health/live", None, {200}),
    (1, "GET", "/lora-adapters", None, {200}),
    (1, "POST", "/lora-adapters", lambda source: [], {200}),
    (1, "GET", "/openapi.json", None, {200}),
    (1, "GET", "/", None, {200}),
    (1, "POST", "/v1/embeddings", lambda source: {"input": text(source)}, {501}),
    (1, "POST", "/v1/rerank", lambda source: {"query": "a", "documents": ["b"]}, {501}),
)


def draw(source: random.Random) -> Ask:
    """Draw a request that is right."""
    n_generating = sum(route.weight for route in _GENERATING) * 2
    n_others = sum(weight for weight, *_ in _OTHERS)
    if source.randrange(n_generating + n_others) < n_generating:
        return draw_generating(source, streamed=source.random() < 0.6)
    weights = [weight for weight, *_ in _OTHERS]
    _, method, path, body, allowed = source.choices(_OTHERS, weights)[0]
    name = f"{method} {path}"
    filled = path.format(slot=source.randrange(4))
    content = body(source) if body is not None else None
    data, head = request(method, filled, content, key=source.choice(KEYS))
    return Ask(name=name, data=data, head=head, allowed=frozenset(allowed))


def draw_generating(source: random.Random, *, streamed: bool) -> Ask:
    """Draw a request that generates text; some have a deadline."""
    route = source.choices(_GENERATING, [route.weight for route in _GENERATING])[0]
    body = route.body(source)
    if streamed and not isinstance(body.get("prompt"), list):
        body["stream"] = True
    allowed, end, headers = {200, 429}, route.end if body.get("stream") else b"", []
    if source.random() < 0.1:  # a deadline
        allowed, end = allowed | {504}, b""
        if source.random() < 0.5:
            body["timeout"] = source.uniform(0.001, 0.3)
        else:
            headers = [f"X-Request-Timeout: {source.uniform(0.001, 0.3):.3f}"]
    if route.path == "/infill":
        allowed |= {501}  # not every model can
    name = f"POST {route.path}" + (", streamed" if body.get("stream") else "")
    data, head = request("POST", route.path, body, *headers, key=source.choice(KEYS))
    return Ask(name=name, data=data, head=head, allowed=frozenset(allowed), end=end)


def long_stream(source: random.Random, n_predict: int = 64, n_probs: int = 20) -> Ask:
    """A stream of many bytes, for those that read it slowly."""
    body = {"prompt": text(source), "n_predict": n_predict, "n_probs": n_probs, "stream": True}
    data, head = request("POST", "/completion", body | {"ignore_eos": True})
    allowed = frozenset({200, 429})
    return Ask(name="a slow reader", data=data, head=head, allowed=allowed, end=b'"stop":true')


def named_stream(source: random.Random, name: str) -> Ask:
    """A stream that can be resumed."""
    body = {"prompt": text(source), "n_predict": 128, "stream": True, "ignore_eos": True}
    data, head = request("POST", "/completion", body, f"X-Conversation-Id: {name}")
    allowed = frozenset({200, 409, 429})
    return Ask(name="a stream that is resumed, POST", data=data, head=head, allowed=allowed)


def rest_of_stream(name: str, offset: int) -> Ask:
    """The rest of one. It may be gone: others may have needed its place, or have taken it."""
    data, head = request("GET", f"/v1/stream?conv_id={name}&from={offset}")
    allowed = frozenset({200, 400, 404})
    return Ask(name="a stream that is resumed, GET", data=data, head=head, allowed=allowed)


def stop_of_stream(name: str) -> Ask:
    """The end of one."""
    data, head = request("DELETE", f"/v1/stream?conv_id={name}")
    allowed = frozenset({204})
    return Ask(name="a stream that is resumed, DELETE", data=data, head=head, allowed=allowed)


def is_whole(body: bytes) -> bool:
    """True if a stream has come to its end without a gap: an id is the place of its event's end."""
    offset = 0
    *events, rest = body.split(b"\n\n")
    for event in events:
        offset += len(event) + 2
        if event.startswith(b"id: ") and int(event[4:].split(b"\n")[0]) != offset:
            return False
    return rest == b"" and b'"stop":true' in events[-1]


def _bad_requests(source: random.Random) -> tuple[tuple[int, bytes, int], ...]:
    """Wrong requests: the status that each has to get, its bytes, and how many are its head."""
    chat = "/v1/chat/completions"
    body = chat_body(source)
    huge, n_head = request("POST", chat, {"messages": ["x" * 2 * MAX_BODY]})
    return (
        (400, *request("POST", chat, b'{"messages": ')),
        (400, *request("POST", chat, b"\xff\xfe\x00")),
        (400, *request("POST", chat, [1])),
        (400, *request("POST", chat, b"[" * 50_000)),
        (400, *request("POST", chat, {"messages": 5})),
        (400, *request("POST", chat, {"messages": [{"role": "stranger", "content": {}}]})),
        (400, *request("POST", chat, body | {"max_tokens": "many"})),
        (400, *request("POST", chat, body | {"temperature": "hot"})),
        (400, *request("POST", chat, body | {"response_format": {"type": "none of these"}})),
        (400, *request("POST", "/completion", {"prompt": [10**9], "n_predict": 1})),
        (
            400,
            *request(
                "POST", "/completion", {"prompt": text(source) + " word" * 6000, "n_predict": 1}
            ),
        ),
        (400, *request("POST", "/completion", {"prompt": "a", "grammar": "root ::= ("})),
        (400, *request("POST", "/v1/messages", {"messages": [], "max_tokens": 1})),
        (400, *request("POST", "/v1/responses", {"input": {"type": "no list"}})),
        (400, *request("POST", "/slots/99?action=erase")),
        (400, *request("POST", "/slots/0?action=restore", {"filename": "../nothing"})),
        (401, *request("POST", chat, body, key="")),
        (401, *request("GET", "/slots", key="wrong")),
        (403, *request("POST", chat, body, "Origin: http://elsewhere.example")),
        (404, *request("GET", "/" + "a" * source.randrange(1, 500))),
        (400, *request("POST", "/completion", {"stream": True}, "X-Conversation-Id: " + "x" * 300)),
        (400, *request("GET", "/v1/stream?conv_id=")),
        (404, *request("GET", "/v1/stream?conv_id=nothing&from=1")),
        (404, *request("GET", "/v1/stream/nothing")),
        (405, *request("GET", chat)),
        (413, huge, n_head),
    )


def draw_bad(source: random.Random) -> Ask:
    """Draw a request that is wrong."""
    status, data, head = source.choice(_bad_requests(source))
    allowed = {400, 429} if status == 400 else {status}  # what is wrong may be found in the queue
    return Ask(name="a bad request", data=data, head=head, allowed=frozenset(allowed))
