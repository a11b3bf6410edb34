"""Log lines that are written once, such as one for a field that has no effect."""

from __future__ import annotations

import re

from trioserve.log import get_logger

_log = get_logger(__name__)

#: A place in a list. Another place is nothing new.
_PLACES = re.compile(r"\[\d+\]")

#: The lines that were logged. Clients write a part of them, so their number is limited.
_logged: set[tuple[str, ...]] = set()
_MAX_LOGGED = 1000


def leave_out(what: str, why: str) -> None:
    """Log that something in requests is left out, if it was not logged before."""
    _once("left out of requests", what=_PLACES.sub("[]", f"{what:.200}"), why=why)


def answer_another(name: str, model: str) -> None:
    """Log that a model answers to the name of another, if it was not logged before."""
    _once("a model answers to a name that is not its own", name=f"{name:.200}", model=model)


def _once(event: str, **fields: str) -> None:
    key = (event, *fields.values())
    if key not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(key)
        _log.info(event, **fields)
