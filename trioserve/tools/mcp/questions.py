"""`Questions`: what an MCP server asks while one of its tools runs.

It may ask the person who approves calls (elicitation), the model (sampling), and for the folders
that it may use (roots). A question belongs to the call that runs. If none or several run, it
is declined, as where no person approves calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import mcp_types
import trio
from mcp.client.session import ClientRequestContext
from mcp_types import ElicitResult, ErrorData
from pydantic import FileUrl

from trioserve.errors import TrioServeError
from trioserve.media.plain_text import plain
from trioserve.tools.tool import ToolCallContext

#: Questions that a call may have, characters of one, and tokens of an answer of the model.
_MAX_QUESTIONS = 8
_MAX_CHARS = 20_000
_MAX_TOKENS = 2048

#: The Python types of the properties that a form may have.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
}

_DECLINED = ElicitResult(action="decline")


@attrs.define(eq=False)
class _Call:
    """A call that runs."""

    context: ToolCallContext
    extend: Callable[[float], None]  # sets in how many seconds it must have ended
    timeout: float
    open: set[trio.CancelScope] = attrs.field(factory=set)  # its questions
    n_left: int = _MAX_QUESTIONS

    def take(self) -> bool:
        self.n_left -= 1
        return self.n_left >= 0


class Questions:
    """Answers the questions of one server.

    Args:
        server: its name.
        roots: the folders that it may use.
    """

    def __init__(self, server: str, roots: Sequence[str] = ()) -> None:
        self._server = server
        self._roots = [
            mcp_types.Root(uri=FileUrl(path.as_uri()), name=path.name)
            for path in map(Path.resolve, map(Path, roots))
        ]
        self._calls: list[_Call] = []
        self._turn = trio.Lock()

    @contextmanager
    def during(
        self, context: ToolCallContext, extend: Callable[[float], None], timeout: float
    ) -> Iterator[None]:
        """Answer the questions of a call while the block runs."""
        call = _Call(context, extend, timeout)
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)
            for scope in call.open:
                scope.cancel()

    async def elicit(
        self, context: ClientRequestContext, params: mcp_types.ElicitRequestParams
    ) -> ElicitResult | ErrorData:
        """Ask the person. The words of the approval are the form, as a JSON object."""
        if isinstance(params, mcp_types.ElicitRequestURLParams):
            question = f"asks you to open {params.url}: {params.message}"
            return _DECLINED if await self._ask(question) is None else ElicitResult(action="accept")
        schema = params.requested_schema
        question = (
            f"asks: {params.message}\nApprove with a JSON object as the reason that has the form "
            f"{json.dumps(schema, ensure_ascii=False)}"
        )
        words = await self._ask(question)
        filled = None if words is None else _filled(words, schema)
        return _DECLINED if filled is None else ElicitResult(action="accept", content=filled)

    async def sample(
        self, context: ClientRequestContext, params: mcp_types.CreateMessageRequestParams
    ) -> mcp_types.CreateMessageResult | ErrorData:
        """Have the model answer, once the person has agreed to what it is asked."""
        messages = _messages(params)
        if messages is None or params.tools:
            return _refusal("this model gets text only, and no tools")
        shown = "\n\n".join(f"{each['role']}: {each['content']}" for each in messages)
        call = self._only
        if call is None or call.context.generate is None:
            return _refusal("no call of this answer's model waits for it")
        if call.context.approves_all:
            if not call.take():
                return _refusal(f"a call may ask {_MAX_QUESTIONS} times")
        elif await self._ask(f"asks the model:\n\n{shown}") is None:
            return _refusal("the person has declined")
        fields: dict[str, Any] = {"max_tokens": max(1, min(params.max_tokens, _MAX_TOKENS))}
        if params.temperature is not None:
            fields["temperature"] = params.temperature
        if params.stop_sequences:
            fields["stop"] = params.stop_sequences
        answers = list[tuple[str, str]]()
        try:
            with self._patient(call):
                answers.append(await call.context.generate(messages, fields))
        except TrioServeError as error:
            return _refusal(error.message)
        if not answers:
            return _refusal("the call has ended")
        text, model = answers[0]
        content = mcp_types.TextContent(type="text", text=text)
        return mcp_types.CreateMessageResult(role="assistant", content=content, model=model)

    async def roots(self, context: ClientRequestContext) -> mcp_types.ListRootsResult:
        return mcp_types.ListRootsResult(roots=self._roots)

    @property
    def _only(self) -> _Call | None:
        return self._calls[0] if len(self._calls) == 1 else None

    async def _ask(self, question: str) -> str | None:
        """Ask the person. None: no."""
        call = self._only
        if call is None or call.context.ask is None or len(question) > _MAX_CHARS:
            return None
        if not call.take():
            return None
        words = None
        with self._patient(call):
            async with self._turn:
                words = await call.context.ask(plain(f"The MCP server {self._server} {question}"))
        return words

    @contextmanager
    def _patient(self, call: _Call) -> Iterator[None]:
        """Stop the time of a call during a block, which ends with the call."""
        call.open.add(scope := trio.CancelScope())
        call.extend(math.inf)
        if call not in self._calls:
            scope.cancel()
        try:
            with scope:
                yield
        finally:
            call.open.remove(scope)
            if not call.open:
                call.extend(call.timeout)


def _filled(words: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a form that a person has filled in; None: it is not as the schema says."""
    try:
        form = json.loads(words or "{}")
    except (ValueError, RecursionError):
        return None
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(form, dict) or not isinstance(properties, dict):
        return None
    if not isinstance(needed, list) or not all(isinstance(name, str) for name in needed):
        return None
    if not form.keys() <= properties.keys() or not form.keys() >= set(needed):
        return None
    for name, value in form.items():
        about = properties[name] if isinstance(properties[name], dict) else {}
        types = _TYPES.get(str(about.get("type", "string")), ())
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return None
        if isinstance(choices := about.get("enum"), list) and value not in choices:
            return None
    return form


def _messages(params: mcp_types.CreateMessageRequestParams) -> list[dict[str, Any]] | None:
    """The messages of a chat; None if one has parts other than text."""
    messages = []
    if params.system_prompt:
        messages.append({"role": "system", "content": params.system_prompt})
    for each in params.messages:
        parts = each.content_as_list
        if not all(isinstance(part, mcp_types.TextContent) for part in parts):
            return None
        text = "\n".join(part.text for part in parts if isinstance(part, mcp_types.TextContent))
        messages.append({"role": each.role, "content": text})
    return messages if params.messages else None


def _refusal(why: str) -> ErrorData:
    return ErrorData(code=mcp_types.INVALID_REQUEST, message=f"Declined: {why}.")
