"""The line that each request leaves in the log, once it has been answered or left."""

from __future__ import annotations

import re
from typing import Any

from trioserve.api.base.caller import Caller, waited
from trioserve.api.base.errors import is_ours
from trioserve.errors import TrioServeError
from trioserve.log import get_logger

_log = get_logger("trioserve.request")

#: The status of a request whose client left before there was one, as in the log of nginx.
CLIENT_LEFT = 499

#: The real name of a browser, in a header that begins with the name of another one.
_BROWSER = re.compile(r"\b(?:Edg|OPR|Firefox|Chrome|Safari)/\d+")
_AGENT = re.compile(r"[!-~]{1,40}")


def tell(
    caller: Caller, status: int, path: str | None = None, *, is_quiet: bool = False, **more: Any
) -> None:
    """Log a request.

    Args:
        caller: its client, with what its tasks came to.
        status: of its answer.
        path: what to call its path; none: as it is.
        is_quiet: write the line at the level of debug.
        more: other fields. Those that are empty are left out.
    """
    tally, error = caller.tally, caller.tally.error
    fields: dict[str, Any] = {
        "method": f"{caller.method:.20}",
        "path": f"{path or caller.path:.200}",
        "status": status,
        "key": "" if caller.key is None else caller.key.name,
        "client": caller.address,
        "agent": agent_in(caller.headers.get("User-Agent", "")),
        "model": tally.model or next(iter(caller.servers), ""),
    }
    if tally.n_prompt:
        fields |= {
            "prompt_tokens": tally.n_prompt,
            "cached_tokens": tally.n_cached,
            "completion_tokens": tally.n_output,
        }
    if tally.queue_ms is not None:
        fields["queue_ms"] = round(tally.queue_ms, 1)
        fields["ttft_ms"] = round(tally.ttft_ms, 1)
    fields["total_ms"] = round(waited(caller) * 1e3, 1)
    if error is not None:
        is_known = isinstance(error, TrioServeError)
        fields["error"] = error.message if is_known else type(error).__name__
        fields["code"] = (error.code or error.type) if is_known else "server_error"
    elif tally.cancelled is not None:
        fields["cancelled"] = tally.cancelled.value
    elif tally.finish is not None and "cancelled" not in more:
        fields["finish"] = tally.finish.value
    fields |= more
    is_late = error is not None and is_ours(error)  # the status says that all is well
    is_fault = is_late or (status >= 500 and status != 501)  # a 501 says how to have it
    log = _log.debug if is_quiet else _log.warning if is_fault else _log.info
    log("request", **{name: value for name, value in fields.items() if value != ""})


def tell_refused(address: str, status: int, error: TrioServeError) -> None:
    """Log a request that was refused before its head was read."""
    code = error.code or error.type
    _log.info("request", status=status, client=address, error=error.message, code=code)


def agent_in(header: str) -> str:
    """The name of the program in a User-Agent; empty: it has none."""
    found = _BROWSER.search(header) or _AGENT.match(header)
    return "" if found is None else found[0]
