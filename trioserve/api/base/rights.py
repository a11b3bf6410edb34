"""What the API key of the current request may do. Without keys, every client may do everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from quart import current_app, request

from trioserve.api.base.connection import current_request
from trioserve.errors import PermissionDeniedError

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def manages(handler: _Handler) -> _Handler:
    """Mark a handler that changes the server, or what other clients have."""
    handler.manages = True  # type: ignore[attr-defined]
    return handler


def check_route() -> None:
    """Check that the key may use the route of the current request.

    Raises:
        PermissionDeniedError: the route needs a key that may manage the server.
    """
    if getattr(current_app.view_functions.get(request.endpoint or ""), "manages", False):
        check_manages(f"{request.method} {request.path}")


def check_manages(what: str) -> None:
    """Check that the key may manage the server, which `what` does.

    Raises:
        PermissionDeniedError: it may not.
    """
    key = current_request().key
    if key is not None and not key.may_manage:
        raise PermissionDeniedError(
            f"The API key {key.name!r} may not manage the server, as {what} does. The file of API "
            "keys gives this permission with manage = true."
        )


def own_name() -> str | None:
    """The name of the key, if it may see no other's usage; None: it may see that of all."""
    key = current_request().key
    return None if key is None or key.may_manage else key.name


def may_use(*names: str) -> bool:
    """Whether the key may use a model, which has these names."""
    key = current_request().key
    return key is None or key.may_use(*names)


def check_model(*names: str) -> None:
    """Check that the key may use a model, which has these names.

    Raises:
        PermissionDeniedError: it may not.
    """
    if not may_use(*names):
        raise PermissionDeniedError(f"This API key may not use the model {names[0]!r}.")
