"""From what a request holds to what `Server` takes. The vocabulary is needed for that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from trioserve.api.base import sse
from trioserve.api.base.body import read_body
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.payload import RANDOM_SEED
from trioserve.api.base.queue import Waiting, current_queue
from trioserve.api.base.readers import RawPrompt
from trioserve.api.base.service import current_service
from trioserve.errors import InvalidRequestError
from trioserve.server import Server
from trioserve.server.stream import ChatStream, Stream
from trioserve.types import GenerationParams, TokenId


async def options_for(server: Server, wanted: GenerationRequest) -> GenerationParams:
    """Make the options of a request: what it sets, and the server's defaults.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """
    if wanted.n_copies > server.n_slots:
        param = "n" if wanted.n_copies == wanted.n else "best_of"
        raise InvalidRequestError(
            f"'{param}' must be between 1 and {server.n_slots}, the number of slots.", param=param
        )
    settings = wanted.given_params()
    if wanted.logit_bias is not None:
        settings["logit_bias"] = await _biases(server, wanted)
    return server.options(settings)


async def read_chat() -> dict[str, Any]:
    """Read the body of a chat. Its last message may be the assistant's, to go on with.

    Where the configuration does not want that, it has to be asked for.

    Raises:
        InvalidRequestError: it is not a JSON object.
    """
    body = await read_body()
    prefills = current_service().config.prefill_assistant
    if not prefills and body.get("continue_final_message") is None:
        body["continue_final_message"] = False
    return body


def copies_of(options: GenerationParams, n: int) -> list[GenerationParams]:
    """Make the options of `n` outputs of one prompt: a seed counts up, as in llama-server.

    Only the first may have a slot of its choice.
    """
    seed = options.sampling.seed
    copies = [options]
    for i in range(1, n):
        sampling = options.sampling
        if seed not in (-1, RANDOM_SEED):
            sampling = attrs.evolve(sampling, seed=(seed + i) % 2**32)
        copies.append(attrs.evolve(options, sampling=sampling, id_slot=-1))
    return copies


async def _biases(server: Server, wanted: GenerationRequest) -> tuple[tuple[TokenId, float], ...]:
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
    prompt: RawPrompt,
    *,
    add_special: bool = True,
    parse_special: bool = True,
) -> tuple[TokenId, ...]:
    """Tokenize a prompt. Special tokens are added where it begins with text.

    Ids in it stay, and are not checked: the engine looks at those of a task.
    """
    parts = (prompt,) if isinstance(prompt, str) else prompt
    tokens: list[TokenId] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            special = add_special and i == 0
            tokens += await server.tokenize(part, add_special=special, parse_special=parse_special)
        else:
            tokens.append(part)
    return tuple(tokens)


def pings_for(
    server: Server, wanted: GenerationRequest, streams: Sequence[Stream | ChatStream]
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
