"""Models that programs may call: those of a server that runs, or in processes of our own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

import attrs
import msgspec

from trioserve.errors import UnavailableError
from trioserve.fair_limiter import current_client
from trioserve.models.catalog import find_for
from trioserve.remote.answers import AnswerEvent, Models, Usage
from trioserve.remote.client import Request, ServerAnswer, ServerClient, connected_to
from trioserve.router.fleet import Fleet
from trioserve.router.models import send_to
from trioserve.router.states import QueueStatus
from trioserve.server.keys import Keys

T = TypeVar("T")

#: Takes a sentence that describes what a call is waiting for.
Tell: TypeAlias = Callable[[str], None]


@attrs.frozen
class Listed:
    """A model that may be named in a request."""

    name: str
    state: str


@attrs.frozen
class ModelSource:
    """What answers requests for models."""

    #: Gives the client of the server of a model; its name is None where there is only one. Raises
    #: TrioServeError: there is no such model.
    client: Callable[[str | None, Tell], ServerClient]
    #: Lists the models. Raises TrioServeError.
    listed: Callable[[], Awaitable[list[Listed]]]

    async def ask(self, path: str, body: Mapping[str, Any], form: type[T], tell: Tell) -> T:
        """Send a request to the model that the body names. Raises as `ServerClient.ask`."""
        return await self.client(body.get("model"), tell).ask(path, body, form=form)


@attrs.frozen
class _OwnModels:
    """Models in processes that are started when they are first needed.

    Args:
        fleet: the processes.
        keys: of the processes. A call names its client, by its key or else its address, so that
            clients take turns there, and keys share no cache.
    """

    _fleet: Fleet
    _keys: Keys

    def client(self, name: str | None, tell: Tell) -> ServerClient:
        """See `ModelSource.client`."""
        entry = find_for(self._keys.find(current_client()), self._fleet.catalog, name)

        def waits(waiting: QueueStatus) -> None:
            share = "" if waiting.progress is None else f": {waiting.progress:.0%}"
            tell(f"Loading {entry.name}{share}")

        @asynccontextmanager
        async def send(request: Request) -> AsyncIterator[ServerAnswer]:
            headers = tuple(self._client_headers())
            async with send_to(
                self._fleet, entry, request, headers=headers, on_wait=waits
            ) as answer:
                tell("")
                yield answer

        return ServerClient(send)

    def _client_headers(self) -> Iterator[tuple[bytes, bytes]]:
        keys, client = self._keys, current_client()
        if keys.needed:
            key = keys.first if keys.find(client) is None else client
            yield b"authorization", f"Bearer {key}".encode()
        elif client:
            yield b"x-forwarded-for", client.encode()

    async def listed(self) -> list[Listed]:
        """See `ModelSource.listed`."""
        key = self._keys.find(current_client())
        names = [
            one.name
            for one in self._fleet.catalog.entries.values()
            if not one.hidden and (key is None or key.may_use(one.name, *one.aliases))
        ]
        return [Listed(name, self._fleet.state(name).value.value) for name in names]


@asynccontextmanager
async def models_of_server(
    url: str, *, socket_path: str | None = None, api_key: str | None = None
) -> AsyncIterator[ModelSource]:
    """The models of a server that runs, which finds them by their names.

    Arguments are those of `connected_to`.
    """
    async with connected_to(url, socket_path=socket_path, api_key=api_key) as client:

        async def listed() -> list[Listed]:
            models = await client.ask("/v1/models", form=Models)
            return [Listed(one.id, one.state) for one in models.data]

        yield ModelSource(lambda name, tell: client, listed)


@asynccontextmanager
async def models_of_fleet(fleet: Fleet, keys: Keys) -> AsyncIterator[ModelSource]:
    """The models of a fleet, whose processes have these keys. Leaving the block ends them."""
    own = _OwnModels(fleet, keys)
    async with fleet:
        yield ModelSource(own.client, own.listed)


class ChatResult(msgspec.Struct, kw_only=True):
    """The answer of a chat."""

    text: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""


async def chat(
    models: ModelSource, request: Mapping[str, Any], tell: Tell, comes: Callable[[str], None]
) -> ChatResult:
    """Have a model answer a chat, asked for as a stream, so that its text can be told as it comes.

    Args:
        models: those that there are.
        request: as for ``/v1/chat/completions``.
        tell: called with what the call is waiting for.
        comes: takes the text as it comes, that of reasoning, too.

    Raises:
        TrioServeError: it does not answer.
    """
    body = {**request, "stream_options": {"include_usage": True}}
    client = models.client(body.get("model"), tell)
    text, reasoning = list[str](), list[str]()
    model, usage = "", Usage(0)
    finish_reason: str | None = None
    async with client.events("/v1/chat/completions", body, form=AnswerEvent) as events:
        async for event in events:
            model, usage = event.model or model, event.usage or usage
            for choice in event.choices:
                finish_reason = choice.finish_reason or finish_reason
                reasoning.append(choice.delta.reasoning_content or "")
                text.append(choice.delta.content or "")
                comes(reasoning[-1] + text[-1])
    if finish_reason is None:
        raise UnavailableError(f"{client.name} sends an answer that has no end.")
    return ChatResult(
        text="".join(text),
        reasoning="".join(reasoning),
        model=model,
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )
