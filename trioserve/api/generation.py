"""From what a request holds to what `Server` takes. The vocabulary is needed for that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trioserve.api import sse
from trioserve.api.queue import Waiting, current_queue
from trioserve.api.schema import Generation
from trioserve.api.values import Prompt
from trioserve.errors import InvalidRequestError
from trioserve.server import Server
from trioserve.stream import ChatStream, Stream
from trioserve.types import Options, TokenId


async def options_for(server: Server, wanted: Generation) -> Options:
    """Make the options of a request: what it sets, and the server's defaults.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """
    settings = wanted.settings()
    if wanted.logit_bias is not None:
        settings["logit_bias"] = await _biases(server, wanted)
    return server.options(settings)


async def _biases(server: Server, wanted: Generation) -> tuple[tuple[TokenId, float], ...]:
    biases: list[tuple[TokenId, float]] = []
    for token, bias in wanted.logit_bias or ():
        if isinstance(token, str):
            ids = await server.tokenize(token, add_special=False, parse_special=False)
            biases += ((each, bias) for each in ids)
        else:
            check_token(server, token, "logit_bias")
            biases.append((token, bias))
    return tuple(biases)


def check_token(server: Server, token: TokenId, param: str) -> None:
    """Check that an id is in the vocabulary.

    Raises:
        InvalidRequestError: it is not; `param` names the field.
    """
    if not 0 <= token < server.vocab.n_tokens:
        raise InvalidRequestError(
            f"'{param}' has token id {token}; the vocabulary ends at {server.vocab.n_tokens - 1}.",
            param=param,
        )


async def tokens_for(
    server: Server,
    prompt: Prompt,
    *,
    param: str,
    add_special: bool = True,
    parse_special: bool = True,
) -> tuple[TokenId, ...]:
    """Tokenize a prompt. Ids in it stay; special tokens are added where it begins with text.

    Raises:
        InvalidRequestError: an id is not in the vocabulary; `param` names the field.
    """
    parts = (prompt,) if isinstance(prompt, str) else prompt
    tokens: list[TokenId] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            special = add_special and i == 0
            tokens += await server.tokenize(part, add_special=special, parse_special=parse_special)
        else:
            check_token(server, part, param)
            tokens.append(part)
    return tuple(tokens)


def pings_for(
    server: Server, wanted: Generation, streams: Sequence[Stream | ChatStream]
) -> sse.Pings:
    """Decide what the response to a request says while its streams are silent."""
    interval = wanted.sse_ping_interval
    if interval is None:
        interval = server.config.sse_ping_interval
    mailboxes = [stream.mailbox for stream in streams]
    return sse.Pings(
        interval if interval > 0 else math.inf,
        Waiting(current_queue(), mailboxes),
        tell_place=wanted.queue_comments,
    )
