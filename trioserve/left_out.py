"""What requests ask for and do not get, because their answer is right without it: logged once."""

from __future__ import annotations

import re

from trioserve.log import get_logger

_log = get_logger(__name__)

#: Where something is in a list. Another place is nothing new.
_PLACES = re.compile(r"\[\d+\]")

#: What has been logged. Clients write a part of it, so that there is a limit.
_logged: set[tuple[str, str]] = set()
_MAX_LOGGED = 1000


def leave_out(what: str, why: str) -> None:
    """Log that something in requests is left out, if it was not logged before.

    Args:
        what: the field, the tool, the part of a message.
        why: what happens instead.
    """
    key = (_PLACES.sub("[]", f"{what:.200}"), why)
    if key in _logged or len(_logged) >= _MAX_LOGGED:
        return
    _logged.add(key)
    _log.info("left out of requests", what=key[0], why=why)
