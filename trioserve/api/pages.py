"""The page at ``/``, or the files that are served in its place."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import cast

import trio
from quart import Blueprint, Quart, request, send_file
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.exceptions import NotFound

from trioserve.api.base.intake import current_intake, intake_of
from trioserve.errors import NotFoundError

blueprint = Blueprint("pages", __name__)

_POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # noqa: E501


@cache
def _index() -> bytes:
    return (files("trioserve") / "ui" / "index.html").read_bytes()


@blueprint.get("/")
async def index() -> Response:
    """Serve the page, unless ``--no-ui`` or ``--path`` says otherwise."""
    config = current_intake().config
    if config.static_path is not None:
        return await _file(config.static_path, "index.html")
    if not config.ui:
        raise NotFoundError("This server has no page: it runs with --no-ui.")
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return Response(_index(), headers=headers, content_type="text/html; charset=utf-8")


async def _file(directory: str, name: str) -> Response:
    """Send a file of the directory; a link or a name that leads out of it is not found."""
    path = await trio.to_thread.run_sync(_inside, Path(directory), name)
    if path is None:
        raise NotFoundError("File Not Found")
    return cast(Response, await send_file(path))


def _inside(directory: Path, name: str) -> Path | None:
    try:
        path = (directory / name).resolve(strict=True)
    except (OSError, ValueError):  # not there, too long, or with a NUL
        return None
    return path if path.is_file() and path.is_relative_to(directory.resolve()) else None


def install(app: Quart) -> None:
    """Serve the files of ``--path`` where there is no route. To be done after the check of keys."""

    async def static() -> Response | None:
        directory = intake_of(app).config.static_path
        is_free = isinstance(request.routing_exception, NotFound)
        if directory is None or not is_free or request.method not in ("GET", "HEAD"):
            return None
        name = request.path.removeprefix("/")
        return await _file(directory, name if not name.endswith("/") else f"{name}index.html")

    app.before_request(static)
