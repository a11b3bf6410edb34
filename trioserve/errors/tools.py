"""Tools that cannot be run, or fail."""

from __future__ import annotations

from trioserve.errors.refused import InvalidRequestError, NotFoundError
from trioserve.errors.root import TrioServeError


class UnknownToolError(InvalidRequestError):
    """There is no such tool, or it cannot do what is asked, such as to stream its output."""

    status = 404
    code = "tool_not_found"


class UnknownToolCallError(NotFoundError):
    """There is no such call in this answer."""

    code = "tool_call_not_found"


class ToolCallDecidedError(InvalidRequestError):
    """The call does not wait for approval, or not any more; or it has ended already."""

    status = 409
    code = "tool_call_decided"


class ToolRuntimeError(TrioServeError):
    """The place where tools are to run is none that there is, or it cannot be reached.

    The status is llama-server's.
    """

    code = "tool_runtime"


class ToolError(TrioServeError):
    """A tool could not be run, or has failed. A model is told so as the result of its call."""

    code = "tool_failed"


class ToolFileError(ToolError):
    """A file of a tool is not there, cannot be read or written, or is where tools may not go."""

    code = "tool_file"


class ToolTimeoutError(ToolError):
    """A tool took longer than it may."""

    code = "tool_timeout"


class ToolServerError(ToolError):
    """An MCP server cannot be started or reached, has ended, or answers nonsense."""

    code = "tool_server_failed"


class ProxyError(TrioServeError):
    """The server that a page wants to reach through this one does not answer."""

    status = 502
    code = "proxy_failed"


class ProxyTimeoutError(ProxyError):
    """It took too long."""

    status = 504
    type = "timeout_error"
