"""What programs may call (`TOOLS`), and the protocol by the official SDK."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import mcp_types
import msgspec
import trio
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.session import ServerSession
from msgspec import UNSET, UnsetType

from trioserve._version import __version__
from trioserve.concurrency import alongside
from trioserve.errors import TrioServeError
from trioserve.log import get_logger
from trioserve.mcp_server.models import ChatResult, Listed, ModelSource, chat
from trioserve.remote.answers import Content, Scores, Tokens, Vectors
from trioserve.tools.tool import about, read_arguments, schema_of

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

    def given(self, *names: str) -> dict[str, Any]:
        """Take the fields that are set: the server has defaults for the others."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not UNSET}


class Earlier(msgspec.Struct, forbid_unknown_fields=True):
    """An earlier message of the chat."""

    role: Literal["system", "user", "assistant"]
    content: str


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
        """See `ModelTool.call`."""
        messages = [msgspec.to_builtins(one) for one in self.history]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        request: dict[str, Any] = {
            "messages": [*messages, {"role": "user", "content": self.prompt}],
            **self.given("model", "max_tokens", "temperature"),
        }
        if self.json_schema is not UNSET:
            schema = {"name": "answer", "schema": self.json_schema}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return await chat(models, request, report.waits, report.comes)


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
        """See `ModelTool.call`."""
        body = {"input": self.texts, **self.given("model", "dimensions")}
        answer = await models.ask("/v1/embeddings", body, Vectors, report.waits)
        return EmbedResult(answer.in_order(), answer.model)


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
        """See `ModelTool.call`."""
        body = self.given("query", "documents", "model", "top_n")
        answer = await models.ask("/v1/rerank", body, Scores, report.waits)
        best = sorted(answer.results, key=lambda one: -one.relevance_score)
        found = [RankedDocument(one.index, one.relevance_score) for one in best]
        return RerankResult(found, answer.model)


class TokenizeResult(Tokens):
    """Token ids, and how many they are."""

    count: int


class TokenizeTool(ModelTool):
    """Turn text into the token ids of a model, and count them."""

    NAME = "tokenize"
    TITLE = "Turn text into tokens"
    RESULT = TokenizeResult

    text: Annotated[str, about("The text.")]
    model: _ModelName = UNSET

    async def call(self, models: ModelSource, report: Report) -> TokenizeResult:
        """See `ModelTool.call`."""
        body = {"content": self.text, **self.given("model")}
        answer = await models.ask("/tokenize", body, Tokens, report.waits)
        return TokenizeResult(answer.tokens, len(answer.tokens))


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
        """See `ModelTool.call`."""
        body = self.given("tokens", "model")
        answer = await models.ask("/detokenize", body, Content, report.waits)
        return DetokenizeResult(answer.content)


class ModelList(msgspec.Struct):
    """The models, and whether they are in memory."""

    models: list[Listed]


class ListTool(ModelTool):
    """List the models that the other tools can use, and whether they are loaded."""

    NAME = "list_models"
    TITLE = "List the models"
    RESULT = ModelList

    async def call(self, models: ModelSource, report: Report) -> ModelList:
        """See `ModelTool.call`."""
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
