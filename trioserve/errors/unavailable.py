"""A server that cannot answer now: status 503."""

from __future__ import annotations

from trioserve.errors.root import TrioServeError


class UnavailableError(TrioServeError):
    """The server is up but takes no requests. Try again, or elsewhere."""

    status = 503
    type = "unavailable_error"


class MemoryFullError(UnavailableError):
    """Requests hold as much memory as they may. `retry_after` is in seconds."""

    code = "memory_full"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelLoadingError(UnavailableError):
    """The model is not loaded yet."""

    def __init__(self, message: str = "Loading model") -> None:
        super().__init__(message)


class ModelFailedError(UnavailableError):
    """The process of a model has died too often. `retry_after` is in seconds."""

    code = "model_failed"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelProcessError(UnavailableError):
    """The process of a model ended before it had answered."""

    code = "model_process_ended"

    def __init__(
        self, message: str = "The process of the model ended before it had answered."
    ) -> None:
        super().__init__(message)


class ServerSleepingError(UnavailableError):
    """The model is not in memory, and what was called does not load it. `Server.awake` does."""

    def __init__(self, message: str = "The server sleeps: its model is not in memory") -> None:
        super().__init__(message)


class ServerClosingError(UnavailableError):
    """The server drains: what runs may finish, and nothing new is taken."""

    def __init__(self, message: str = "The server is shutting down") -> None:
        super().__init__(message)
