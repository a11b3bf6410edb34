"""What the request router knows about a prompt: how it begins, as hashes.

Serve's proxy does not look into bodies, and the router needs to know no more than which requests
begin alike. So the ingress makes a `RoutingHint` of each body, once; it goes to the router as an
argument of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import attrs

#: Beginnings of this length, twice this length and so on are hashed, and those that end with a
#: message or with the tools.
SHORTEST = 256
#: No more than this of a prompt is looked at, nor more beginnings.
LONGEST, MOST = 65_536, 32

#: Names of what is no text, such as images in base64. So much of their beginning and end is hashed.
_MEDIA = frozenset(("data", "file_data", "image_url", "images", "multimodal_data", "url"))
_SAMPLE = 16_384
_DEPTH = 8  # of lists and objects in a message; what is deeper is left out
#: Where there is no beginning that could be cached.
_OTHERS = ("embeddings", "embedding", "embed", "rerank", "reranking", "tokenize", "detokenize")


@attrs.frozen
class RoutingHint:
    """What is known of a request before it goes to a replica.

    The router goes by the names of the attributes, not by the class, which Ray may pickle by value.
    """

    #: Beginnings of the prompt from short to long: a hash, and how many characters it is of.
    blocks: tuple[tuple[int, int], ...] = ()
    #: Requests with the same key go to the same replica, whatever they begin with.
    key: str | None = None


def hint_of(route: str, body: object, key: str | None = None) -> RoutingHint:
    """Make the hint for a request. It never raises, since a bad body is for the replica to refuse.

    Args:
        route: the path, with or without a query.
        body: what the body's JSON says, or None.
        key: what names a state that only one replica has, such as a stream that can be resumed.
    """
    last = route.partition("?")[0].rstrip("/").rpartition("/")[2]
    if not isinstance(body, Mapping) or last in _OTHERS:
        return RoutingHint(key=key)
    text = _Beginning()
    for part in _parts(body):
        for string in part:
            text.add(string)
        text.cut()
        if text.full:
            break
    return RoutingHint(tuple(text.blocks), key)


class _Beginning:
    """Hashes of a text's beginnings, while it grows."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []
        self._hash = blake2b(digest_size=8)
        self._length = 0
        self._next = SHORTEST

    @property
    def full(self) -> bool:
        """Whether the rest does not matter."""
        return self._length >= LONGEST or len(self.blocks) >= MOST

    def add(self, text: str) -> None:
        """Go on with this text, up to the bounds."""
        while text and not self.full:
            now, text = text[: self._next - self._length], text[self._next - self._length :]
            self._hash.update(now.encode("utf-8", "surrogatepass"))
            self._length += len(now)
            if self._length == self._next:
                self._next *= 2
                self.cut()

    def cut(self) -> None:
        """Note the text so far as a beginning that others may have."""
        if self._length > (self.blocks[-1][1] if self.blocks else 0) and len(self.blocks) < MOST:
            self.blocks.append((int.from_bytes(self._hash.digest(), "big"), self._length))


def _parts(body: Mapping[str, Any]) -> Iterator[Iterator[str]]:
    """Yield what the prompt is made of, in its order in most chat templates.

    The names are those of all APIs; no request has two of the same meaning.
    """
    # Requests with other adapters or another salt share nothing in the cache.
    yield _strings({name: body[name] for name in ("lora", "cache_salt") if body.get(name)})
    yield _strings([body.get(name) for name in ("system", "instructions", "tools", "functions")])
    for name in ("messages", "input", "prompt", "input_extra", "input_prefix", "images"):
        value = body.get(name)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield from map(_strings, value)
        else:
            yield _strings(value)


def _strings(value: object, depth: int = _DEPTH, media: bool = False) -> Iterator[str]:
    """Yield the strings of a JSON value, in an order that does not depend on who wrote it."""
    if isinstance(value, str):
        yield _digest(value) if media else value
    elif isinstance(value, (int, float)):
        yield f"{value},"
    elif isinstance(value, list) and depth:
        for one in value:
            yield from _strings(one, depth - 1, media)
    elif isinstance(value, Mapping) and depth:
        names = set(value) - {"cache_control"}  # it moves on with each turn
        if names == {"type", "text"}:  # as if the content were this string
            yield from _strings(value["text"], depth - 1)
            return
        for name in sorted(names):
            yield name
            yield from _strings(value[name], depth - 1, name in _MEDIA)


def _digest(data: str) -> str:
    """Return what stands for an image or a recording: as long as a text that costs as much."""
    sample = f"{len(data)},{data[:_SAMPLE]},{data[-_SAMPLE:]}"
    return blake2b(sample.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest() * 32
