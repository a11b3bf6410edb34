"""Texts that are too long for an embedding, cut: what Ollama and Cohere do unless asked not to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from trioserve.errors import InputTooLongError
from trioserve.server.generation.embeddings import Embeddings
from trioserve.server.prompts.text import PromptLike
from trioserve.server.server import Server
from trioserve.types import TokenId


async def embed_cut(
    server: Server,
    texts: Sequence[str],
    embed: Callable[[Sequence[PromptLike]], Awaitable[Embeddings]],
    *,
    limit: int | None = None,
    keeps_end: bool = False,
) -> Embeddings | None:
    """Make an embedding of each text, without what is beyond the limit; none without texts.

    Args:
        server: has the vocabulary.
        texts: what to embed.
        embed: makes the embeddings.
        limit: the most tokens of a text; the context and the batch have limits, too.
        keeps_end: cut a text at its beginning.
    """
    prompts: Sequence[PromptLike] = texts
    if limit is not None:
        prompts = [await _cut(server, each, limit, keeps_end=keeps_end) for each in texts]
    while prompts:
        try:
            return await embed(prompts)
        except InputTooLongError as error:
            # That of the context; there may be a smaller one of a batch.
            shortest = error.n_ctx
            prompts = [await _cut(server, each, shortest, keeps_end=keeps_end) for each in texts]
    return None


async def _cut(server: Server, text: str, limit: int, *, keeps_end: bool) -> tuple[TokenId, ...]:
    """Cut a text that has too many tokens. What begins and ends every text stays there."""
    tokens = await server.tokenize(text, param="input")
    if len(tokens) <= limit:
        return tokens
    around = await server.tokenize("")
    n_first, n_last = int(tokens[:1] == around[:1]), int(tokens[-1:] == around[-1:])
    end = len(tokens) - n_last
    if not keeps_end:
        return tokens[: limit - n_last] + tokens[end:]
    return tokens[:n_first] + tokens[end - max(0, limit - n_first - n_last) :]
