"""The page at ``/``."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

blueprint = Blueprint("pages", __name__)

_POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # noqa: E501


@cache
def _index() -> bytes:
    return (files("trioserve") / "ui" / "index.html").read_bytes()


@blueprint.get("/")
async def index() -> Response:
    """Serve the page."""
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return Response(_index(), headers=headers, content_type="text/html; charset=utf-8")
