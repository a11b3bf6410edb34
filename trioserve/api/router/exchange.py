"""`Exchange`: a request to an `UpstreamServer`, and its answer, passed on in whole events.

The upstream learns nothing of the client, and the client nothing of the upstream's API key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from time import monotonic, time
from typing import Annotated, Any, TypeAlias

import attrs
import msgspec
import trio

from trioserve.api.base import errors, sse
from trioserve.api.base.body import SHORT_BODY
from trioserve.api.base.caller import Caller
from trioserve.api.base.chat_request import RUN_TOOLS
from trioserve.api.base.reply import Data, KeepAlive, Pieces, Reply
from trioserve.children.lines import LineTooLongError
from trioserve.concurrency import Bell, Feed, alone, deadline_scope
from trioserve.config import Config
from trioserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    StalledReaderError,
    TooManyRequestsError,
    TrioServeError,
    UnsupportedFieldError,
    UpstreamError,
    UpstreamTimeoutError,
    UpstreamUnavailableError,
)
from trioserve.fair_limiter import FairLimiter, offload
from trioserve.log import get_logger
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.upstreams import Api, Upstream
from trioserve.remote.answers import Count, Text
from trioserve.remote.client import (
    LostServerError,
    RawEvents,
    ServerAnswer,
    ServerClient,
    SilentServerError,
    data_of,
    error_in,
    receive_all,
)
from trioserve.server.limits.rates import RateLimits
from trioserve.server.observers.observer import (
    Observer,
    RequestEnd,
    RequestInfo,
    RequestRecord,
    emit,
)
from trioserve.types import CancelReason, FinishReason, Timings
from trioserve.whole_numbers import whole_number

_log = get_logger("trioserve.router")

#: The API of a route, and where an upstream has it, below its address.
ROUTES: Mapping[str, tuple[Api, str]] = {
    "/v1/chat/completions": ("chat", "/chat/completions"),
    "/chat/completions": ("chat", "/chat/completions"),
    "/v1/completions": ("completions", "/completions"),
    "/v1/embeddings": ("embeddings", "/embeddings"),
    "/v1/rerank": ("rerank", "/rerank"),
    "/v1/reranking": ("rerank", "/rerank"),
    "/v1/responses": ("responses", "/responses"),
    "/v1/messages": ("messages", "/messages"),
    "/v1/messages/count_tokens": ("messages", "/messages/count_tokens"),
}

#: The operations of APIs other than chats, as the log and the traces name them.
_OPERATIONS: Mapping[Api, str] = {
    "completions": "text_completion", "embeddings": "embeddings", "rerank": "rerank",
}  # fmt: skip

#: Fields that this server acts on itself, and does not send to the upstream.
_OWN_FIELDS = frozenset({"keep_alive", "queue_comments", "sse_ping_interval", "timeout"})

#: Fields that reach what other clients of the upstream's key have stored there.
_OF_STORE = ("previous_response_id", "conversation", "background")

#: Headers of Anthropic's clients, which say what their requests mean.
_MEANING = ("anthropic-version", "anthropic-beta")

#: The types of the last events of streams; OpenAI's older APIs have a text in place of one.
_LAST = frozenset({"message_stop", "response.completed", "response.failed", "response.incomplete"})
_DONE = b"[DONE]"

#: Models that an upstream may list, and bytes of its list.
_MAX_LISTED, _MAX_LIST = 2000, 2**22

#: Bytes of a whole answer, of one with an error, of an event, and of events that are not sent yet.
_MAX_ANSWER, _MAX_ERROR, _MAX_EVENT, _MAX_UNSENT = 2**26, 2**20, 2**24, 2**18

#: Estimated bytes of a request per token.
_BYTES_PER_TOKEN = 4

#: Seconds after which a refused client may come back: where none are given, and at most.
_RETRY_AFTER, _MAX_RETRY_AFTER = 1.0, 3600.0

#: An object whose values are not read.
_Fields = dict[str, msgspec.Raw]


# -- the tokens of an answer


#: Tokens of a request. What an upstream counts beyond that is no number of tokens.
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class _Usage(msgspec.Struct, kw_only=True):
    """The tokens of a request, in the words of all APIs."""

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens | None = None


@attrs.define(eq=False)
class Tally:
    """The tokens of a request: those that the upstream counts, or else an estimate."""

    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    _is_counted: bool = False

    def on_event(self) -> None:
        """Estimate that an event has a token."""
        if not self._is_counted:
            self.n_output += 1

    def read(self, fields: _Fields) -> None:
        """Read what an answer, or an event, has of it."""
        for holder in (fields, *(_object(fields.get(name)) for name in ("response", "message"))):
            with suppress(ValueError):
                used = _decode(holder.get("usage", b"null"), _Usage | None)
                if used is not None:
                    self._take(used)

    def _take(self, used: _Usage) -> None:
        self._is_counted = True
        details = used.prompt_tokens_details or used.input_tokens_details or _Details()
        written, read = used.cache_creation_input_tokens, used.cache_read_input_tokens
        n_prompt = (used.prompt_tokens or used.input_tokens or 0) + (written or 0) + (read or 0)
        self.n_prompt = n_prompt or self.n_prompt
        self.n_cached = details.cached_tokens or read or self.n_cached
        self.n_output = used.completion_tokens or used.output_tokens or 0

    def end(self, error: BaseException | None, seconds: float) -> RequestEnd:
        """Tell how the request ended."""
        failure = error if isinstance(error, Exception) else None
        n_new = max(0, self.n_prompt - self.n_cached)
        return RequestEnd(
            n_output=self.n_output,
            total_s=seconds,
            timings=Timings(cache_n=self.n_cached, prompt_n=n_new, predicted_n=self.n_output),
            finish=FinishReason.EOS if error is None else None,
            cancelled=None if error is None or failure else CancelReason.DISCONNECT,
            error=failure,
            had_slot=self.n_prompt > 0,
        )


def _decode(data: bytes | bytearray | msgspec.Raw, form: Any) -> Any:
    """Read JSON of a form. Raises ValueError, also if it is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=form)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(raw: bytes | None) -> _Fields:
    """Read an object; empty: it is something else."""
    with suppress(ValueError):
        return dict(_decode(raw or b"{}", _Fields))
    return {}


# -- the server


class _Model(msgspec.Struct):
    id: Text
    context_length: Count | None = None
    max_model_len: Count | None = None


class _Models(msgspec.Struct):
    """The models that an upstream lists."""

    data: list[_Model]


@attrs.define(eq=False)
class UpstreamServer:
    """An upstream as it is now.

    Attributes:
        upstream: how it is configured.
        client: reaches it.
        places: of requests.
        listed: what it offers: names here and there.
        contexts: the tokens that requests to its models may have, by the names there.
        problem: why it failed the last time; empty: it did not.
        retired: rings when it is no longer wanted.
        limits: of the clients of each model.
        running: requests, by the names of models.
    """

    upstream: Upstream
    client: ServerClient
    places: FairLimiter
    listed: Sequence[tuple[str, str]]
    contexts: Mapping[str, int] = attrs.field(factory=dict)
    problem: str = ""
    retired: Bell = attrs.field(factory=Bell)
    limits: dict[str, RateLimits] = attrs.field(factory=dict)
    running: Counter[str] = attrs.field(factory=Counter)

    def note(self, problem: str) -> None:
        """Note why it fails, or that it does not."""
        if problem != self.problem:
            about = {"problem": problem} if problem else {}
            _log.warning("an upstream has changed", upstream=self.upstream.name, **about)
        self.problem = problem

    def entries(self) -> Iterator[ModelEntry]:
        """The models, as the catalog has them."""
        for name, remote in self.listed:
            yield ModelEntry(
                name=self.upstream.prefix + name,
                source=Source.UPSTREAM,
                args=(),
                path=None,
                upstream=self.upstream,
                remote_name=remote,
            )

    async def look(self) -> None:
        """Read which models it has. If it does not answer, those that it had stay."""
        await alone(self._look, self._not_seen)

    async def _look(self) -> None:
        deadline = trio.current_time() + self.upstream.connect_timeout
        with deadline_scope(deadline, f"{self.client.name} is silent."):
            found = await self.client.ask("/models", form=_Models, most=_MAX_LIST)
        models = found.data[:_MAX_LISTED]
        if not self.upstream.models:
            self.listed = [(one.id, one.id) for one in models]
        sizes = {one.id: one.context_length or one.max_model_len for one in models}
        self.contexts = {name: size for name, size in sizes.items() if size}
        self.note("")

    def _not_seen(self, error: TrioServeError) -> None:
        if isinstance(error, LostServerError):
            self.note(f"{self.client.name} fails: {error.message}")
        elif not self.upstream.models or isinstance(error, DeadlineExceededError):
            self.note(self.upstream.without_key(error.message))
        # One whose models are named need not list them.


# -- the exchange


def tokens_in(n_bytes: int) -> int:
    """Estimate the tokens of a prompt by the bytes of its request."""
    return n_bytes // _BYTES_PER_TOKEN + 1


def body_for(fields: Mapping[str, Any], api: Api, model: str) -> tuple[dict[str, Any], bool]:
    """Write the body for an upstream, and say whether the usage in a stream is only for us.

    Raises:
        UnsupportedFieldError: a field needs a model that is here.
    """
    for name in (RUN_TOOLS, *(_OF_STORE if api == "responses" else ())):
        if fields.get(name):
            raise UnsupportedFieldError.at(name, "needs a model that runs on this server.")
    body = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    body["model"] = model
    if api == "responses":
        body["store"] = False
    options = fields.get("stream_options") or {}
    if api not in ("chat", "completions") or not fields.get("stream") or type(options) is not dict:
        return body, False
    body["stream_options"] = {**options, "include_usage": True}
    return body, not options.get("include_usage")


@attrs.define(eq=False, kw_only=True)
class Exchange:
    """A request to an upstream. `replies` has the answer as soon as it begins.

    Attributes:
        server: the upstream.
        name: of the model here.
        api: of the request.
        path: of the route there.
        body: what is sent.
        n_asked: an estimate of the tokens of the prompt.
        hides_usage: whether the client does not want the usage in a stream.
        caller: the client.
        config: of this server.
        settle: called with the tokens that were used.
    """

    server: UpstreamServer
    name: str
    api: Api
    path: str
    body: Mapping[str, Any]
    n_asked: int
    hides_usage: bool
    caller: Caller
    config: Config
    settle: Callable[[int], None]
    replies: Feed[Reply] = attrs.field(factory=Feed)
    _pieces: Feed[bytes] = attrs.field(init=False, factory=lambda: Feed(_MAX_UNSENT, len))
    _tally: Tally = attrs.field(init=False, factory=Tally)

    async def run(self, observers: Iterable[Observer]) -> None:
        """Run it, and tell observers of its end. When cancelled, the connection is closed."""
        error: BaseException | None = None
        began, key = monotonic(), self.caller.key
        self.server.running[self.name] += 1
        try:
            with deadline_scope(self.caller.wait_until):
                async with self.server.places.place():
                    await self._run()
        except Exception as failure:
            error = errors.known(failure)
            self.replies.end(error)
            self._pieces.end(error)
        except BaseException as cancelled:
            error = cancelled
            raise
        finally:
            tally = self._tally
            self.server.running[self.name] -= 1
            self.settle(tally.n_prompt + tally.n_output)
            operation = _OPERATIONS.get(self.api, "chat")
            info = RequestInfo(
                0, self.name, tally.n_prompt, operation, key="" if key is None else key.name
            )
            emit(observers, RequestRecord(info, tally.end(error, monotonic() - began)))
            del error  # break the cycle: its traceback refers to this frame
        self._pieces.end()

    async def _run(self) -> None:
        headers = [
            (name.encode(), value.encode("latin-1"))
            for name in (_MEANING if self.api == "messages" else ())
            if (value := self.caller.headers.get(name)) is not None
        ]
        try:
            async with self.server.client.answer(
                self.path, self.body, any_status=True, headers=headers
            ) as answer:
                await self._receive(answer)
        except LostServerError as error:
            is_silent = isinstance(error, SilentServerError)
            kind = UpstreamTimeoutError if is_silent else UpstreamUnavailableError
            failure = kind(f"{self.server.client.name} fails: {error.message}")
            self.server.note(failure.message)
            raise failure from error
        self.server.note("")

    async def _receive(self, answer: ServerAnswer) -> None:
        if answer.status != 200:
            data = await receive_all(answer, _MAX_ERROR, self.server.client.name)
            error = self._refusal(answer, data)
            if isinstance(error, UpstreamError | UpstreamUnavailableError):
                self.server.note(error.message)
            raise error
        if answer.header(b"content-encoding") not in (b"", b"identity"):
            raise self._failure("compresses its answer")
        self._tally.n_prompt = self.n_asked
        if not answer.header(b"content-type").lower().startswith(b"text/event-stream"):
            self.replies.put(await self._whole(answer))
            return
        reply = Pieces(
            pieces=self._written(),
            headers=dict(sse.HEADERS),
            content_type=sse.CONTENT_TYPE,
            keep_alive=KeepAlive.every(self.config.sse_ping_interval),
        )
        self.replies.put(reply)
        await self._stream(answer)

    def _failure(self, what: str) -> UpstreamError:
        return UpstreamError(f"{self.server.client.name} {what}.")

    async def _whole(self, answer: ServerAnswer) -> Reply:
        """Receive an answer of JSON."""
        whole = bytearray()
        while part := await answer.receive():
            self.caller.held.grow(len(part))
            whole += part
            if len(whole) > _MAX_ANSWER:
                raise self._failure("sends an answer that is too long")
        read = partial(_decode, whole, _Fields)
        try:
            self._tally.read(await offload(read, len(whole), SHORT_BODY))
        except ValueError as error:
            raise self._failure(f"answers no JSON: {error}") from error
        return Data(body=bytes(whole))

    async def _stream(self, answer: ServerAnswer) -> None:
        """Pass events on as they come, each as a whole."""
        events, is_over = RawEvents(_MAX_EVENT), False
        failure: TrioServeError | None = None
        while not is_over:
            data, ready = await answer.receive(), list[bytes]()
            try:
                for event in events.feed(data or b"\n\n"):
                    is_over |= self._event(event, ready)
            except LineTooLongError:
                failure = self._failure("sends an event that is too long")
            except UpstreamError as error:
                failure = error
            if not (data or is_over):
                failure = failure or self._failure("ends its answer too early")
            await self._pass_on(b"".join(ready))
            if failure is not None:
                raise failure

    async def _pass_on(self, data: bytes) -> None:
        """Queue events once the client has room. Raises StalledReaderError if it reads too late."""
        with trio.move_on_after(self.config.stall_timeout) as waiting:
            await self._pieces.room()
        if waiting.cancelled_caught:
            raise StalledReaderError("The client does not read its answer.")
        if data:
            self._pieces.put(data)

    def _event(self, lines: Sequence[bytes], ready: list[bytes]) -> bool:
        """Take an event, and say whether it is the last one. Raises UpstreamError."""
        data = data_of(lines)
        written = b"\n".join(lines) + b"\n\n"
        if data == _DONE or not data:
            ready.append(written)
            return bool(data)
        try:
            fields: _Fields = _decode(data, _Fields)
        except ValueError as error:
            raise self._failure(f"sends an event that is no JSON: {error}") from error
        if bytes(fields.get("error", b"null")) != b"null":
            raise self._said(error_in(data, 200, self.server.client.name), UpstreamError)
        self._tally.on_event()
        if b'"usage"' in data:
            self._tally.read(fields)
        if not (
            self.hides_usage and bytes(fields.get("choices", b"")) == b"[]" and "usage" in fields
        ):
            ready.append(written)
        kind = bytes(fields.get("type", b"")).strip(b'"').decode(errors="replace")
        return kind in _LAST

    async def _written(self) -> AsyncGenerator[bytes, None]:
        # An async generator, so no nursery or cancel scope may be open at a `yield`.
        try:
            async for piece in self._pieces:
                yield piece
        except TrioServeError as error:
            yield errors.last_event(self.caller.path, error)

    # -- what an upstream refuses

    def _refusal(self, answer: ServerAnswer, data: bytes) -> TrioServeError:
        """The error of an answer with another status than 200.

        The client is not at fault if the upstream refuses its API key, and does not see what the
        upstream says of the key.
        """
        status, said = answer.status, error_in(data, answer.status, self.server.client.name)
        if status == 401:
            return self._failure("refuses its API key")
        if status in (429, 503, 529):
            kind = TooManyRequestsError if status == 429 else UpstreamUnavailableError
            return self._said(said, kind, retry_after=_seconds(answer.header(b"retry-after")))
        if status in (408, 504):
            return self._said(said, UpstreamTimeoutError)
        if status in (402, 403) or not 400 <= status < 500:
            return self._said(said, UpstreamError)
        return self._said(said, _REFUSED.get(status, InvalidRequestError), param=said.param)

    def _said(
        self, said: TrioServeError, kind: type[TrioServeError], **more: Any
    ) -> TrioServeError:
        return kind(self.server.upstream.without_key(said.message), **more)


#: The errors of statuses that are the client's fault.
_REFUSED: Mapping[int, type[TrioServeError]] = {404: NotFoundError, 413: PayloadTooLargeError}


def _seconds(header: bytes) -> float:
    """Read a ``Retry-After``: seconds, or a date."""
    seconds: float | None = whole_number(header.strip())
    if seconds is None:
        with suppress(ValueError, TypeError, OverflowError):
            seconds = parsedate_to_datetime(header.decode("latin-1")).timestamp() - time()
    return _RETRY_AFTER if seconds is None else min(max(seconds, 0.0), _MAX_RETRY_AFTER)
