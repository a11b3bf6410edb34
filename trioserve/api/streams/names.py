"""The ids of conversations: what a client calls a stream."""

from __future__ import annotations

from trioserve.errors import InvalidRequestError

#: The header of a POST that names its stream.
ID = "X-Conversation-Id"

MAX_CHARS = 256


def conversation_id(given: bytes, param: str) -> str:
    """Read an id from a header or a parameter. Raises InvalidRequestError: it cannot be one."""
    try:
        id_ = given.decode()
    except UnicodeDecodeError:  # a header may be that, too
        id_ = given.decode("latin-1")
    if not 0 < len(id_) <= MAX_CHARS or not id_.isprintable():
        raise InvalidRequestError(
            f"'{param}' must be 1 to {MAX_CHARS} characters, none of them a control character.",
            param=param,
        )
    return id_
