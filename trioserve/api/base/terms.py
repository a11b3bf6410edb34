"""What holds for a request whatever it asks for: whose it is, and until when it may run."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import attrs
import trio

from trioserve.api.base.fields import MismatchError
from trioserve.api.base.readers import seconds
from trioserve.api.base.request import current_request
from trioserve.errors import DeadlineExceededError, InvalidRequestError
from trioserve.types import CancelReason

#: The header that says in how many seconds a request has to be done. The field `timeout` wins.
HEADER = "X-Request-Timeout"

_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)


@attrs.frozen
class Terms:
    """The terms of a request.

    `client` is its API key, which takes turns with others in the queue, and is never shown.
    `deadline` is when its time is up (`trio.current_time`).
    """

    client: str = attrs.field(default="", repr=False)
    deadline: float = math.inf

    def arguments(self) -> dict[str, Any]:
        """What the methods of `Server` take, from now.

        Raises:
            DeadlineExceededError: there is no time left.
        """
        left = self.deadline - trio.current_time()
        if left <= 0:
            raise DeadlineExceededError("The request's deadline has passed.")
        return {
            "client": self.client,
            "timeout": None if left == math.inf else left,
            "on_cancel": CancelReason.DISCONNECT,
        }


class Timed(Protocol):
    """A request that may say in how many seconds it has to be done."""

    @property
    def timeout(self) -> float | None:
        """That many seconds, or none."""


def terms_of(wanted: Timed) -> Terms:
    """Find the terms of the current request. Its time began before its body was read.

    Raises:
        InvalidRequestError: the header is not a number of seconds.
    """
    request = current_request()
    timeout = wanted.timeout
    if timeout is None and (value := request.headers.get(HEADER)) is not None:
        timeout = _read(value.strip())
    deadline = math.inf if timeout is None else request.arrived + timeout
    return Terms(request.api_key, deadline)


def _read(value: str) -> float:
    try:
        return seconds(float(value) if _NUMBER.fullmatch(value) else None)
    except MismatchError as error:
        raise InvalidRequestError(f"'{HEADER}' must be {error.expected}.", param=HEADER) from None
