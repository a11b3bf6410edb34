"""The tools of the MCP server (`TOOLS`), and the protocol by the official SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

import mcp_types
import msgspec
import trio
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.session import ServerSession
from msgspec import UNSET, UnsetType

from trioserve._version import __version__
from trioserve.chat.deltas import ContentDelta, ReasoningDelta
from trioserve.concurrency import alongside
from trioserve.errors import TrioServeError
from trioserve.log import get_logger
from trioserve.mcp_server.models import Listed, ModelSource
from trioserve.remote.server import AnyServer
from trioserve.server.keywords import ChatFields
from trioserve.server.stream import ChatChunk
from trioserve.tools.tool import about, read_arguments, schema_of
from trioserve.types import FinishReason, Grammar

#: Seconds between two notifications of one call.
_INTERVAL = 0.5

#: Characters of a message.
_MAX_MESSAGE = 4000

_ModelName: TypeAlias = (
    Annotated[str, about("Name of the model, as list_models has it. Default: the one there is.")]
    | UnsetType
)

_log = get_logger("trioserve.mcp")
_INSTRUCTIONS = (
    "Language models that run on this machine, or on a server of the user's. Calls may take a "
    "while: a model may have to be loaded first, and answers come at the speed of the machine."
)

#: In the scope of an HTTP request: an event that is set when its response has ended. A call that
#: still runs then ends, because its result could not be sent.
ENDED = "trioserve.ended"

#: Parts of a message that are text.
_TEXTS = (ContentDelta, ReasoningDelta)

_CUT = "[The answer ends here because the limit of its length was reached.]"
_Context = ServerRequestContext[Any, Any]


class Report:
    """The progress of a call: seconds, and the text that has come since the last notification.

    A client that asks for progress starts its timeout again with each. Nothing is sent to others.
    """

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._state = ""
        self._text = ""

    def waits(self, state: str) -> None:
        """Report what the call is waiting for; empty: it is running."""
        self._state = state

    def comes(self, text: str) -> None:
        """Add text to the message of the progress report."""
        self._text = (self._text + text)[-_MAX_MESSAGE:]

    async def run(self) -> None:
        """Notify the client until cancelled."""
        begun = trio.current_time()
        while True:
            await trio.sleep(_INTERVAL)
            message, self._text = self._text or self._state, ""
            seconds = round(trio.current_time() - begun, 3)
            await self._session.report_progress(seconds, message=message or None)


class ModelTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call of a tool. The fields of a subclass are the arguments, and its docstring tells models
    what the tool does. An argument that is not known is refused, because it would have no effect.
    """

    NAME: ClassVar[str]
    TITLE: ClassVar[str]
    RESULT: ClassVar[type[msgspec.Struct]]

    async def call(self, models: ModelSource, report: Report) -> msgspec.Struct:
        """Do the work. Raises TrioServeError."""
        raise NotImplementedError

    def use(
        self, models: ModelSource, report: Report
    ) -> AbstractAsyncContextManager[tuple[str, AnyServer]]:
        """Take the model that the call names, for a block."""
        return models.use(self.given("model").get("model"), report.waits)

    def given(self, *names: str) -> dict[str, Any]:
        """Take the fields that are set: the server has defaults for the others."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not UNSET}


class Earlier(msgspec.Struct, forbid_unknown_fields=True):
    """An earlier message of the chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatResult(msgspec.Struct, kw_only=True):
    """The answer of a chat."""

    text: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""


class ChatTool(ModelTool):
    """Ask a language model that runs locally, and get its answer."""

    NAME = "chat"
    TITLE = "Ask a model"
    RESULT = ChatResult

    prompt: Annotated[str, about("What to ask the model.")]
    system: Annotated[str, about("Instructions for the model.")] = ""
    history: Annotated[list[Earlier], about("The chat before, oldest first.")] = []
    model: _ModelName = UNSET
    max_tokens: Annotated[int, about("Tokens that the answer may have.", ge=1)] | UnsetType = UNSET
    temperature: (
        Annotated[float, about("How random the answer is; 0: not at all.", ge=0)] | UnsetType
    ) = UNSET
    json_schema: (
        Annotated[dict[str, Any], about("JSON Schema that the answer follows.")] | UnsetType
    ) = UNSET

    async def call(self, models: ModelSource, report: Report) -> ChatResult:
        messages = [msgspec.to_builtins(one) for one in self.history]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        messages.append({"role": "user", "content": self.prompt})
        fields = cast(ChatFields, self.given("max_tokens", "temperature"))
        if self.json_schema is not UNSET:
            fields["grammar"] = Grammar("json_schema", json.dumps(self.json_schema))
        async with (
            self.use(models, report) as (name, server),
            server.stream_chat(messages, **fields) as stream,
        ):
            async for chunk in stream:
                deltas = chunk.deltas if isinstance(chunk, ChatChunk) else ()
                texts = (one for one in deltas if isinstance(one, _TEXTS))
                report.comes("".join(one.text for one in texts))
            answer = await stream.read()
        finished = answer.finished
        return ChatResult(
            text=answer.message.content,
            reasoning=answer.message.reasoning_content,
            model=name,
            finish_reason="length" if finished.reason is FinishReason.LIMIT else "stop",
            prompt_tokens=finished.timings.cache_n + finished.timings.prompt_n,
            completion_tokens=finished.timings.predicted_n,
        )


class EmbedResult(msgspec.Struct):
    """Embeddings, in the order of the texts."""

    embeddings: list[list[float]]
    model: str


class EmbedTool(ModelTool):
    """Turn texts into vectors, to find out which are alike in meaning. Needs a model that was \
started with --embeddings."""

    NAME = "embed"
    TITLE = "Make embeddings"
    RESULT = EmbedResult

    texts: Annotated[list[str], about("The texts.", min_length=1)]
    model: _ModelName = UNSET
    dimensions: Annotated[int, about("Numbers to keep of each embedding.", ge=1)] | UnsetType = (
        UNSET
    )

    async def call(self, models: ModelSource, report: Report) -> EmbedResult:
        async with self.use(models, report) as (name, server):
            made = await server.embed(self.texts, **self.given("dimensions"))
        return EmbedResult([vector.tolist() for vector in made.vectors], name)


class RankedDocument(msgspec.Struct):
    """A document: its place in the list that was given, and how well it fits."""

    index: int
    score: float


class RerankResult(msgspec.Struct):
    """Documents, the best first."""

    results: list[RankedDocument]
    model: str


class RerankTool(ModelTool):
    """Sort documents by how well they fit a query. Needs a model that was started with \
--reranking."""

    NAME = "rerank"
    TITLE = "Rank documents"
    RESULT = RerankResult

    query: Annotated[str, about("What is looked for.")]
    documents: Annotated[list[str], about("The documents to rank.", min_length=1)]
    model: _ModelName = UNSET
    top_n: Annotated[int, about("How many of the best to return.", ge=1)] | UnsetType = UNSET

    async def call(self, models: ModelSource, report: Report) -> RerankResult:
        async with self.use(models, report) as (name, server):
            ranking = await server.rerank(self.query, self.documents)
        best = ranking.best(self.given("top_n").get("top_n"))
        return RerankResult([RankedDocument(i, ranking.scores[i]) for i in best], name)


class TokenizeResult(msgspec.Struct):
    """Token ids, and how many they are."""

    tokens: list[int]
    count: int


class TokenizeTool(ModelTool):
    """Turn text into the token ids of a model, and count them."""

    NAME = "tokenize"
    TITLE = "Turn text into tokens"
    RESULT = TokenizeResult

    text: Annotated[str, about("The text.")]
    model: _ModelName = UNSET

    async def call(self, models: ModelSource, report: Report) -> TokenizeResult:
        async with self.use(models, report) as (_, server):
            tokens = await server.tokenize(self.text)
        return TokenizeResult([*tokens], len(tokens))


class DetokenizeResult(msgspec.Struct):
    """The text of some tokens."""

    text: str


class DetokenizeTool(ModelTool):
    """Turn token ids of a model back into text."""

    NAME = "detokenize"
    TITLE = "Turn tokens into text"
    RESULT = DetokenizeResult

    tokens: Annotated[list[int], about("Token ids of the model.")]
    model: _ModelName = UNSET

    async def call(self, models: ModelSource, report: Report) -> DetokenizeResult:
        async with self.use(models, report) as (_, server):
            return DetokenizeResult(await server.detokenize(self.tokens))


class ModelList(msgspec.Struct):
    """The models, and whether they are in memory."""

    models: list[Listed]


class ListTool(ModelTool):
    """List the models that the other tools can use, and whether they are loaded."""

    NAME = "list_models"
    TITLE = "List the models"
    RESULT = ModelList

    async def call(self, models: ModelSource, report: Report) -> ModelList:
        return ModelList(await models.listed())


TOOLS: Sequence[type[ModelTool]] = (
    ChatTool, EmbedTool, RerankTool, TokenizeTool, DetokenizeTool, ListTool,
)  # fmt: skip


def mcp_server(models: ModelSource) -> Server[Any]:
    """Make an MCP server that offers models. A call that the client cancels ends at once."""
    tools = {tool.NAME: tool for tool in TOOLS}

    async def list_tools(
        _context: _Context, _params: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        return mcp_types.ListToolsResult(tools=[_described(tool) for tool in TOOLS])

    async def call_tool(
        context: _Context, params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        try:
            tool = tools.get(params.name)
            if tool is None:
                raise TrioServeError(f"There is no tool {params.name!r}.")
            call = read_arguments(tool, params.arguments or {})
            report = Report(context.session)
            with trio.CancelScope() as scope:
                async with alongside(report.run, partial(_until_unheard, context, scope)):
                    result = await call.call(models, report)
            if scope.cancelled_caught:
                return _said("The client has left.", is_error=True)
        except TrioServeError as error:
            _log.info("a call has failed", tool=params.name, error=error.message)
            return _said(error.message, is_error=True)
        return _answered(result)

    return Server(
        "trioserve",
        version=__version__,
        title="Local language models",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _until_unheard(context: _Context, scope: trio.CancelScope) -> None:
    """Cancel a call over HTTP when its response has ended."""
    if context.request is not None:
        await context.request.scope[ENDED].wait()
        scope.cancel()


def _described(tool: type[ModelTool]) -> mcp_types.Tool:
    return mcp_types.Tool(
        name=tool.NAME,
        title=tool.TITLE,
        description=tool.__doc__,
        input_schema=schema_of(tool),
        output_schema=schema_of(tool.RESULT),
        annotations=mcp_types.ToolAnnotations(
            read_only_hint=True, destructive_hint=False, open_world_hint=False
        ),
    )


def _answered(result: msgspec.Struct) -> mcp_types.CallToolResult:
    """A result for programs, and as text for models: of a chat, the text only."""
    if isinstance(result, ChatResult):
        texts = [result.text, _CUT] if result.finish_reason == "length" else [result.text]
    else:
        texts = [msgspec.json.encode(result).decode()]
    answer = _said(*texts)
    answer.structured_content = msgspec.to_builtins(result)
    return answer


def _said(*texts: str, is_error: bool = False) -> mcp_types.CallToolResult:
    return mcp_types.CallToolResult(
        content=[mcp_types.TextContent(text=text) for text in texts], is_error=is_error
    )
