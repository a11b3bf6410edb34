"""Requests that are wrong, and get a status between 400 and 499."""

from __future__ import annotations

from trioserve.errors.root import TrioServeError


class InvalidRequestError(TrioServeError):
    """A field is missing, has the wrong type, or is out of range."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceededError(InvalidRequestError):
    """The prompt has more tokens than a sequence can hold."""

    type = "exceed_context_size_error"
    code = "context_length_exceeded"

    def __init__(self, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> None:
        number = f"at least {n_prompt_tokens}" if at_least else f"{n_prompt_tokens}"
        super().__init__(
            f"The prompt has {number} tokens, which exceeds the available context size of {n_ctx} "
            "tokens, with room for at least one token of output.",
            param="prompt",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class InputTooLongError(ContextLengthExceededError):
    """A text to be embedded or ranked has more tokens than the model can take."""

    def __init__(self, n_tokens: int, limit: int, message: str, *, param: str) -> None:
        InvalidRequestError.__init__(self, message, param=param)
        self.n_prompt_tokens = n_tokens
        self.n_ctx = limit


class UnknownModelError(InvalidRequestError):
    """There is no model of the name in the request."""

    code = "model_not_found"


class AmbiguousModelError(InvalidRequestError):
    """The name in the request is a part of the names of several models."""

    code = "model_ambiguous"


class ModelNotLoadedError(InvalidRequestError):
    """The model is not loaded, and the request or the configuration says not to load it."""

    code = "model_not_loaded"


class NotSupportedError(TrioServeError):
    """The request asks for something that this server, or the loaded model, does not do."""

    status = 501
    type = "not_supported_error"


class UnsupportedFieldError(InvalidRequestError):
    """A field is known, but this version gives it no effect; so it is refused, not ignored."""


class InvalidMediaError(InvalidRequestError):
    """An image, a sound or a video cannot be read, or is larger than the limits allow.

    `index` says which one it is, where the error is raised for one of several.
    """

    code = "invalid_media"

    def __init__(self, message: str, *, param: str | None = None, index: int = 0) -> None:
        super().__init__(message, param=param)
        self.index = index


class TemplateError(InvalidRequestError):
    """The chat template refuses the messages, or breaks one of the bounds it runs under."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)


class PermissionDeniedError(TrioServeError):
    """It comes from a page of another site, or asks for what belongs to another API key."""

    status = 403
    type = "permission_error"


class AuthenticationError(TrioServeError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"


class NotFoundError(TrioServeError):
    """No such route, model or slot."""

    status = 404
    type = "not_found_error"


class MethodNotAllowedError(TrioServeError):
    """The route exists, but not for this HTTP method."""

    status = 405
    type = "invalid_request_error"


class PayloadTooLargeError(TrioServeError):
    """The body of the request is larger than the server takes."""

    status = 413
    type = "invalid_request_error"


class TooManyRequestsError(TrioServeError):
    """The client asks for more than it may have now. `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(TooManyRequestsError):
    """More requests wait than the server allows."""

    code = "queue_full"


class RateLimitError(TooManyRequestsError):
    """The client has used up its requests or its tokens of this minute."""

    code = "rate_limit_exceeded"
