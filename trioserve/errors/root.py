"""`TrioServeError`, which all exceptions of trioserve come from."""

from __future__ import annotations

from typing import ClassVar


class TrioServeError(Exception):
    """Root of everything that trioserve raises on purpose.

    `message` is one sentence for a person. `param` names the request field at fault, when one is.
    Of an error with `public`, a client gets that sentence, and the message is for the log.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    public: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
