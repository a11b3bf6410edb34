"""`with_session`: a connection to an MCP server for as long as it lasts, and its answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import httpx2
import mcp_types
import trio
from mcp.client.session import ClientSession, IncomingMessage
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.message import SessionMessage
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    JSONRPCRequest,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError

from trioserve._version import __version__
from trioserve.errors import ToolServerError, ToolTimeoutError, TrioServeError, errors_in
from trioserve.log import get_logger
from trioserve.tools.mcp.entries import Entry, StdioEntry
from trioserve.tools.mcp.http import SESSION_LOST, http_streams
from trioserve.tools.mcp.listing import Listing
from trioserve.tools.mcp.messages import (
    MAX_ID,
    TRANSPORT_FAILED,
    Pace,
    fault_of,
    is_awaited,
    without_surrogates,
)
from trioserve.tools.mcp.questions import Questions
from trioserve.tools.mcp.stdio import stdio_streams
from trioserve.tools.tool import ToolCallContext, ToolResult

if TYPE_CHECKING:
    from trioserve.tools.mcp.stdio import Streams

_log = get_logger("trioserve.tools")
T = TypeVar("T")

#: Seconds for a server to start and to introduce itself.
START_SECONDS = 30.0

#: Seconds for the list of tools, with all its pages.
_LIST_SECONDS = 60.0

#: Seconds for a server to answer that it lives.
PING_SECONDS = 2.0

#: Pages of that list.
_MAX_PAGES = 200

#: Requests of a server that are answered in a second.
_REQUESTS_PER_SECOND = 100

#: Parts of a result.
_MAX_PARTS = 1000

#: Progress reports of a server that restart the timeout of a call.
_MAX_EXTENSIONS = 20

#: The SDK's errors for the end of a connection, and for a session that a server has forgotten.
_ENDS = (
    (mcp_types.CONNECTION_CLOSED, "Connection closed"),
    (mcp_types.INVALID_REQUEST, SESSION_LOST),
)

_CLIENT_INFO = mcp_types.Implementation(name="trioserve", version=__version__)


def result_of(answer: CallToolResult) -> ToolResult:
    """The text of an answer. Other content is named, so that the model learns that it exists.

    Structured content is left out where there is text, for servers send it as text as well.
    """
    text = "\n".join(_text_of(block) for block in answer.content)
    if not answer.content and answer.structured_content is not None:
        text = json.dumps(answer.structured_content, ensure_ascii=False)
    if answer.is_error:
        return ToolResult.of_error(text or "The tool has failed, and does not say why.")
    return ToolResult.of_text(text)


def _text_of(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return _not_shown(block.type, block.mime_type, block.data)
        case ResourceLink():
            return f"[resource {block.name}: {block.uri}]"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text
        case EmbeddedResource():
            assert isinstance(block.resource, BlobResourceContents)
            what = f"resource {block.resource.uri}"
            return _not_shown(what, block.resource.mime_type, block.resource.blob)


def _not_shown(what: str, mime_type: str | None, base64: str) -> str:
    kind = "" if mime_type is None else f", {mime_type}"
    return f"[{what}{kind}, {len(base64) * 3 // 4:,} bytes, not shown]"


class ConnectionEndedError(ToolServerError):
    """The connection ended before there was an answer.

    `is_unheard`: the server has certainly not begun with the call.
    """

    def __init__(self, *, is_unheard: bool) -> None:
        super().__init__("it ended before it had an answer")
        self.is_unheard = is_unheard


class McpSession:
    """A server that has introduced itself. May be used by several tasks at the same time."""

    def __init__(
        self,
        client: ClientSession,
        dispatcher: _Dispatcher,
        timeout: float,
        questions: Questions,
    ) -> None:
        self._client, self._questions = client, questions
        self._dispatcher = dispatcher
        self._timeout = timeout

    async def list_tools(self) -> Listing:
        """All its tools, of all pages.

        Raises:
            ToolServerError: it gives no list.
        """
        try:
            with trio.fail_after(_LIST_SECONDS):
                return await self._listed()
        except trio.TooSlowError:
            raise ToolServerError(f"it lists no tools within {_LIST_SECONDS:g} s") from None
        except MCPError as error:
            raise ToolServerError(f"it lists no tools: {_words(error)}") from None

    async def _listed(self) -> Listing:
        listing = Listing()
        cursor: object = None
        for _ in range(_MAX_PAGES):
            params = None if cursor is None else {"cursor": cursor}
            page = await self._dispatcher.send_raw_request("tools/list", params)
            await trio.to_thread.run_sync(listing.add, page.get("tools"))
            last, cursor = cursor, page.get("nextCursor")
            if listing.is_full or not isinstance(cursor, str) or cursor == last:
                break
        return listing

    async def call(
        self, tool: str, arguments: Mapping[str, Any], context: ToolCallContext
    ) -> ToolResult:
        """Call a tool. When cancelled, the call is cancelled in the server, too.

        Raises:
            ToolTimeoutError: it takes too long.
            ConnectionEndedError: the connection ended before there was an answer.
            ToolServerError: its answer is invalid.
        """
        n_extensions = 0

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            nonlocal n_extensions
            if n_extensions < _MAX_EXTENSIONS:
                n_extensions += 1
                scope.deadline = trio.current_time() + self._timeout
            of = "" if total is None else f" of {total:g}"
            context.on_output(f"{progress:g}{of}{'' if message is None else f': {message}'}\n")

        try:
            params = mcp_types.CallToolRequestParams(
                name=tool, arguments=without_surrogates(dict(arguments))
            )
            request = mcp_types.CallToolRequest(params=params)
            request.model_dump(mode="json")
        except (ValueError, RecursionError):
            return ToolResult.of_error("The arguments are nested too deeply.")

        def extend(seconds: float) -> None:
            scope.deadline = trio.current_time() + seconds

        asking = self._questions.during(context, extend, self._timeout)
        with trio.move_on_after(self._timeout) as scope, asking:
            try:
                answer = await self._client.send_request(
                    request,
                    mcp_types.CallToolResult,
                    progress_callback=on_progress,
                )
            except MCPError as error:
                if _has_ended(error):
                    raise ConnectionEndedError(is_unheard=error.message == SESSION_LOST) from None
                if error.code == TRANSPORT_FAILED:
                    raise ToolServerError(error.message) from None
                return ToolResult.of_error(error.message or "The tool has failed.")
            except ValidationError as error:
                raise ToolServerError(f"its answer makes no sense: {_words(error)}") from None
            return result_of(answer)
        raise ToolTimeoutError(f"it has no answer after {self._timeout:g} s")

    async def is_responsive(self) -> bool:
        with trio.move_on_after(PING_SECONDS):
            try:
                await self._client.send_ping()
            except MCPError as error:  # it may answer that it does not support pings
                return not _has_ended(error)
            except ValidationError:
                return True
            return True
        return False


async def with_session(
    entry: Entry,
    use: Callable[[McpSession], Awaitable[T]],
    on_list_changed: Callable[[], None] = lambda: None,
) -> T:
    """Connect to a server, call a function with the session, and end it.

    When cancelled, the program of the server has ended before this raises `Cancelled`.

    Args:
        entry: the server.
        use: the function to call. It is cancelled when the connection ends.
        on_list_changed: called when the server reports that its tools have changed.

    Returns:
        What `use` returned.

    Raises:
        ToolServerError: it cannot be started or reached, or the connection ended before `use`
            returned.
    """

    try:
        connected = stdio_streams(entry) if isinstance(entry, StdioEntry) else http_streams(entry)
        async with connected as streams, _introduced(entry, streams, on_list_changed) as session:
            return await use(session)
    except (Exception, BaseExceptionGroup) as error:
        found = [_server_error(one) for one in errors_in(error) if isinstance(one, Exception)]
        others = error.split(Exception)[1] if isinstance(error, BaseExceptionGroup) else None
        if others is not None:  # cancelled, or the like
            raise others from None
        raise found[0] from None


@asynccontextmanager
async def _introduced(
    entry: Entry, streams: Streams, on_list_changed: Callable[[], None]
) -> AsyncIterator[McpSession]:
    async def on_message(message: IncomingMessage) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            on_list_changed()

    dispatcher, questions = _Dispatcher(entry.name, streams), Questions(entry.name, entry.roots)
    async with ClientSession(
        dispatcher=dispatcher,
        client_info=_CLIENT_INFO,
        message_handler=on_message,
        elicitation_callback=questions.elicit,
        sampling_callback=questions.sample,
        list_roots_callback=questions.roots if entry.roots else None,
    ) as client:
        with trio.fail_after(START_SECONDS):
            await client.initialize()
        yield McpSession(client, dispatcher, entry.timeout, questions)


class _Dispatcher(JSONRPCDispatcher[TransportContext]):
    """Leaves out what a server should not have sent, because the SDK ends or repeats it all."""

    def __init__(self, server: str, streams: Streams) -> None:
        super().__init__(*streams)
        self._server = server
        self._requests = Pace(_REQUESTS_PER_SECOND)
        self._logged: set[str] = set()

    async def _dispatch(self, item: SessionMessage | Exception, *rest: Any) -> None:
        if isinstance(item, SessionMessage):
            problem = fault_of(item.message)
            if problem is not None:
                self._log_once("a message is ignored", problem)
            if problem is not None or not is_awaited(item.message):
                return
            if isinstance(item.message, JSONRPCRequest):
                self._log_once("it asks", item.message.method)
                await self._requests.step()
        await super()._dispatch(item, *rest)

    def _log_once(self, what: str, problem: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _log.info("MCP server", server=self._server, what=what, problem=problem)

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: CallOptions | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        raw = await super().send_raw_request(method, params, opts, **options)
        if method == "tools/call":
            _mend_result(raw)
        if method == "initialize":
            _mend_introduction(raw)
        return raw


def _mend_introduction(raw: dict[str, Any]) -> None:
    """Leave out what is not read of a server's introduction: the session keeps it."""
    raw["capabilities"] = {}
    info = raw.get("serverInfo")
    if isinstance(info, dict):
        raw["serverInfo"] = {key: str(info.get(key))[:MAX_ID] for key in ("name", "version")}
    for key in raw.keys() - {"protocolVersion", "capabilities", "serverInfo"}:
        del raw[key]


def _mend_result(raw: dict[str, Any]) -> None:
    """Leave out the parts that `result_of` does not read, because checking them may take long."""
    content = raw.setdefault("content", [])
    if content:
        raw.pop("structuredContent", None)
    if isinstance(content, list) and len(content) > _MAX_PARTS:
        left_out = f"[{len(content) - _MAX_PARTS:,} more parts, not shown]"
        raw["content"] = [*content[:_MAX_PARTS], {"type": "text", "text": left_out}]


def _has_ended(error: MCPError) -> bool:
    """Test for the SDK's error at an end: servers use its code for other errors, too."""
    return (error.code, error.message) in _ENDS


def _server_error(error: BaseException) -> ToolServerError:
    """Turn an exception into an error for the model; an unexpected one is also logged."""
    if isinstance(error, ToolServerError):
        return error
    if isinstance(error, trio.TooSlowError):
        return ToolServerError(f"it does not introduce itself within {START_SECONDS:g} s")
    if isinstance(error, (anyio.ClosedResourceError, anyio.BrokenResourceError)):
        return ToolServerError("an answer came when its session had ended")
    known = (TrioServeError, MCPError, ValidationError, OSError, RuntimeError, httpx2.HTTPError)
    if not isinstance(error, known):
        _log.error("MCP server", problem="an error that was not foreseen", exc_info=error)
    return ToolServerError(_words(error))


def _words(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) or type(error).__name__
