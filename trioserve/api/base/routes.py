"""`Route`: a method, a path, and the function that answers.

A handler is a function of explicit values: ``await handler(request, caller, models)``, and of the
parts of the path that its rule names. `request` is the instance of its request class; of a route
without one, the parameters in the URL. So the edge calls it, and so do a batch, a session and a
test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias, TypeVar

import attrs

from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import PromptFields
from trioserve.api.base.models import Models
from trioserve.api.base.reply import Reply
from trioserve.api.base.request_schemas import of_fields
from trioserve.api.base.stored import StoredAs, bring
from trioserve.api.base.vendors import Vendor, vendor_of
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, NotFoundError, UnknownFileError
from trioserve.server.model_server import ModelServer

#: The parameters in a URL.
Query: TypeAlias = Mapping[str, str]

Handler: TypeAlias = Callable[..., Awaitable[Reply]]
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def _needs_it(fields: Mapping[str, Any]) -> None:
    return None


class Responder(Protocol):
    """Answers what came from a caller.

    `values` are the parts of the path that the rule names, and `more` what the request class takes
    beside the body.
    """

    async def __call__(
        self, incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
    ) -> Reply: ...


@attrs.frozen
class Waiting:
    """The answers to a client whose model is not loaded.

    Attributes:
        ping: writes what keeps a stream alive, of the name of the model; none: comments, which tell
            where the request stands.
        answer: the answer to a request that needs no model loaded, by its fields; none: it does.
    """

    ping: Callable[[str], bytes] | None = None
    answer: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = _needs_it


_LOADED = Waiting()


def _told(name: str, default: Any = None) -> Any:
    """Declare a field that is what a handler tells of itself under a name; see `tells`."""
    made = attrs.Factory(lambda self: getattr(self.handler, name, default), takes_self=True)
    return attrs.field(init=False, default=made)


@attrs.frozen(eq=False, slots=False)  # for `cached_property`
class Route:
    """One of an app's routes.

    Attributes:
        method: of HTTP. GET stands for HEAD, too.
        path: the rule of the path, as werkzeug writes it.
        handler: answers.
        header: answers in place of another route requests that have this header; none: it is the
            route of its path.
        of_model: whether it is about a request to a model.
        takes: the class that the body becomes; None: there is no body to read.
        content: the type of the body.
        query: the parameters in the URL, with what each does.
        gives: by status and type of content: what it answers.
        streams: the type of its answer where the body asks for a stream.
        waiting: how a client is answered whose model is not loaded.
        about_answer: whether requests are about an answer that another one began: only its server
            knows it.
        manages: whether it changes the server, or what other clients have.
        is_quiet: whether its requests are logged at the level of debug, unless they are refused.
    """

    method: str
    path: str
    handler: Handler
    of_model: bool = False
    header: str = ""
    takes: Any = _told("takes")
    content: str = _told("content", "")
    query: Query = _told("query", {})
    gives: Mapping[str, Mapping[str, Any]] = _told("gives", {})
    streams: str = _told("streams", "")
    waiting: Waiting = _told("waiting", _LOADED)
    about_answer: bool = _told("about_answer", False)
    manages: bool = _told("manages", False)
    is_quiet: bool = _told("is_quiet", False)
    _reads: Callable[[bytes], Any] | None = _told("reads")
    _check_first: Callable[[Any], object] | None = _told("check_first")
    _check_kind: Callable[[ModelServer], object] | None = _told("check_kind")

    @cached_property
    def vendor(self) -> Vendor:
        """The vendor whose forms its path has."""
        return vendor_of(self.path)

    @property
    def prompt_fields(self) -> PromptFields | None:
        """The fields of the prompt, if it can be cached."""
        return getattr(self.takes, "prompt_fields", None)

    @cached_property
    def streams_by_default(self) -> bool | None:
        """The default of the body's field ``stream``; None: it has no such field."""
        schema = None if self.takes is None else of_fields(self.takes).get("stream")
        return None if schema is None else bool(schema["default"])

    @property
    def takes_bytes(self) -> bool:
        """True if it reads the bytes of the body itself."""
        return self._reads is not None

    def asks_for_stream(self, fields: Mapping[str, Any]) -> bool:
        stream = fields.get("stream")
        return stream is True or (stream is None and bool(self.streams_by_default))

    def model_in(self, fields: Mapping[str, Any], query: Query) -> str | None:
        """The name of the model in a request; None: no name. Raises InvalidRequestError."""
        for name in getattr(self.takes, "model_names", ("model",)):
            if (given := fields.get(name)) is None:
                continue
            if not isinstance(given, str):
                raise InvalidRequestError.at(name, "must be a string.")
            return given or None
        return query.get("model") or None

    def answered_by(self, models: Models) -> Responder:
        """Make the function that answers with the handler and some models."""

        async def answer(
            incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
        ) -> Reply:
            request = await self.read(incoming, caller, models, **more)
            also = {"query": incoming.query} if self.query and request is not incoming.query else {}
            return await self.handler(request, caller, models, **values, **also)

        return answer

    async def read(self, incoming: Incoming, caller: Caller, models: Models, **more: Any) -> Any:
        """Make the request that the handler takes; `more` is for its class.

        Raises:
            InvalidRequestError: a field of the body is wrong.
            TrioServeError: as `Incoming.fields`, and from the check of `of_kind`.
        """
        if self._check_first is not None:
            self._check_first(models)
        if self._reads is not None:
            return await incoming.read(self._reads)
        if (takes := self.takes) is None:
            return incoming.query
        if self.content == FORM:
            form = await incoming.form()
            return await incoming.aside(partial(takes.parse, form))
        fields = await incoming.fields(may_be_empty=bool(self.query))
        if self._check_kind is not None:
            # That the model is of another kind comes before whatever else is wrong.
            name = fields.get("model")
            self._check_kind(await models.use(name if isinstance(name, str) else None, caller))
        self._adapt(fields, models.config)
        try:
            return await incoming.aside(partial(takes.parse, fields, **more))
        except UnknownFileError:
            before = (each.before for each in more.values() if isinstance(each, StoredAs))
            incoming.size += await bring([fields, *before], incoming.size, caller, models)
        return await incoming.aside(partial(takes.parse, fields, **more))

    def _adapt(self, fields: dict[str, Any], config: Config) -> None:
        """Change fields as flags say that they are meant."""
        is_reversed = config.priority_order == "lower-first" and not self.vendor.orders_priorities
        if is_reversed and type(fields.get("priority")) is int:
            fields["priority"] = -fields["priority"]
        if not config.prefill_assistant and fields.get("continue_final_message") is None:
            fields["continue_final_message"] = False


#: The type of a body that is a form with files.
FORM = "multipart/form-data"


# -- declaring routes


class Routes(list[Route]):
    """The routes of a module, in the order of their declaration.

    Args:
        of_model: whether each is about a request to a model.
    """

    def __init__(self, *, of_model: bool = False) -> None:
        super().__init__()
        self.of_model = of_model

    def get(self, *paths: str, header: str = "") -> Callable[[_Handler], _Handler]:
        """Declare the handler of GET, and so of HEAD; see `Route.header`."""
        return self.add("GET", *paths, header=header)

    def post(self, *paths: str, header: str = "") -> Callable[[_Handler], _Handler]:
        """Declare the handler of POST."""
        return self.add("POST", *paths, header=header)

    def delete(self, *paths: str, header: str = "") -> Callable[[_Handler], _Handler]:
        """Declare the handler of DELETE."""
        return self.add("DELETE", *paths, header=header)

    def add(self, method: str, *paths: str, header: str = "") -> Callable[[_Handler], _Handler]:
        """Declare the handler of a method on one or more paths."""

        def declare(handler: _Handler) -> _Handler:
            self.extend(Route(method, path, handler, self.of_model, header) for path in paths)
            return handler

        return declare


# -- what a handler tells of itself


def tells(**told: Any) -> Callable[[_Handler], _Handler]:
    """Tell of a handler what its `Route` says of it."""

    def tell(handler: _Handler) -> _Handler:
        vars(handler).update(told)
        return handler

    return tell


#: Marks a handler that changes the server, or what other clients have.
manages = tells(manages=True)

#: Marks a handler that programs and pages ask again and again.
quiet = tells(is_quiet=True)

#: Marks a handler whose requests are about an answer that another request began.
about_answer = tells(about_answer=True)


def while_unloaded(waiting: Waiting) -> Callable[[_Handler], _Handler]:
    """Tell of a handler how a client is answered whose model is not loaded."""
    return tells(waiting=waiting)


def reads(parse: Callable[[bytes], Any]) -> Callable[[_Handler], _Handler]:
    """Tell of a handler that its request is made of the bytes of the body, by a function."""
    return tells(reads=parse)


def only_if(check: Callable[[Any], object]) -> Callable[[_Handler], _Handler]:
    """Tell of a handler that a function looks first whether the app has the feature, or raises."""
    return tells(check_first=check)


def of_kind(check: Callable[[ModelServer], object]) -> Callable[[_Handler], _Handler]:
    """Tell of a handler that its model is of a kind, which a function checks."""
    return tells(check_kind=check)


# -- paths without a route


#: Paths that the original APIs have and this server lacks, each with the reason or a replacement.
_UNSERVED = {
    "OpenAI": {
        "/v1/images/": "no model here makes images; chats may contain them",
        "/v1/videos/": "no model here makes videos; chats may contain them",
        "/v1/moderations/": "ask a model in a chat",
        "/v1/fine_tuning/": "models are served here, and not trained",
        "/v1/assistants/": "/v1/responses takes its place",
        "/v1/threads/": "/v1/conversations takes its place",
        "/v1/vector_stores/": "/v1/embeddings makes vectors, which the client keeps",
        "/v1/uploads/": "/v1/files takes a file in one part",
        "/v1/realtime/": "streams are server-sent events, as of /v1/chat/completions",
        "/v1/containers/": "--tools runs code in a folder of this machine",
        "/v1/evals/": "a client can evaluate with /v1/batches",
        "/v1/organization/": "--api-key-file has the keys, and /v1/usage what they use",
    },
    "Anthropic": {
        "/v1/complete/": "/v1/messages takes its place",
        "/v1/organizations/": "--api-key-file has the keys, and /v1/usage what they use",
        "/v1/skills/": "skills belong to the client",
    },
    "Ollama": {
        "/api/create/": "a section of --models-preset takes the place of a Modelfile",
        "/api/copy/": "--alias, or a section of --models-preset, gives a model another name",
        "/api/push/": "models are downloaded here, and not published",
        "/api/blobs/": "put GGUF files into --models-dir",
    },
    "Cohere": {"/v2/chat/": "/v1/chat/completions takes its place"},
    "Google": {"/v1beta/": "/v1/chat/completions takes its place"},
}

#: Characters of a path that are looked at, and how alike two paths are that a slip tells apart.
_LONGEST, _ALIKE = 100, 0.8


def not_found(path: str, known: Iterable[str]) -> NotFoundError:
    """Make the error of a path that has no route; `known` are the rules of those that have."""
    if len(path) > _LONGEST:
        return NotFoundError(f"There is no {path[:_LONGEST]}… here.")
    for owner, paths in _UNSERVED.items():
        for start, why in paths.items():
            if f"{path}/".startswith((start, start.removeprefix("/v1"))):
                return NotFoundError(f"{owner}'s {path} is not served: {why}.")
    near = get_close_matches(path, {one for one in known if "<" not in one}, 1, _ALIKE)
    end = f"; did you mean {near[0]}?" if near else "."
    return NotFoundError(f"There is no {path.strip() or 'such path'} here{end}")
