"""The page at ``/`` and its files, or the files that are served in its place.

What `make ui` built is served as it is: ``index.html`` is asked for each time, and all that it
names has a hash in its name, so that a browser keeps it for ever.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio
from werkzeug.http import http_date, parse_accept_header, parse_etags
from werkzeug.utils import get_content_type

from trioserve.api.base.answers import Bytes
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Data, Pieces, Reply
from trioserve.api.base.routes import Query, Routes, quiet
from trioserve.api.openapi import gives
from trioserve.errors import NotFoundError

if TYPE_CHECKING:
    from trioserve.api.service import AppState

routes = Routes()

_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}

#: What the page may do: no script and no style but its own, no request to anywhere else, and no
#: text that becomes elements. Of scripts, it starts the worker that colours code.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'{script}",
        "style-src 'self'{style}",
        "img-src 'self' data: blob:",
        "media-src 'self' blob: data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "frame-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types worker",
    )
)

#: What a page that a model wrote may do in its sandbox: run, in a separate origin, and nothing
#: that needs the network. The page's own policy keeps the frame from going elsewhere.
_SANDBOX_POLICY = "; ".join(
    (
        "sandbox allow-scripts",
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "media-src data: blob:",
        "font-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
    )
)

#: Bytes of a file that are read at once.
_PIECE = 2**16

#: What stands in the page itself: its first script, and its first style.
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)

_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-DNS-Prefetch-Control": "off",
    "X-Content-Type-Options": "nosniff",
}


@attrs.frozen
class _File:
    """A file of the page. `packed` is for browsers that take gzip, where that is shorter."""

    body: bytes
    packed: bytes | None
    kind: str
    digest: str
    policy: str


@routes.get("/")
@gives(str, "text/html")
async def index(query: Query, caller: Caller, app: AppState) -> Reply:
    """Serve the page, unless ``--no-ui`` or ``--path`` says otherwise."""
    return await _serve(app, caller, "index.html", "no-cache")


@routes.get("/licenses.txt")
@quiet
@gives(str, "text/plain")
async def licenses(query: Query, caller: Caller, app: AppState) -> Reply:
    """Serve the licenses of what the page is made with."""
    return await _serve(app, caller, "licenses.txt", "no-cache")


@routes.get("/sw.js")
@quiet
@gives(str, "text/javascript")
async def worker(query: Query, caller: Caller, app: AppState) -> Reply:
    """Serve a service worker that removes itself, and so what another server's page has left."""
    return await _serve(app, caller, "sw.js", "no-cache")


@routes.get("/assets/<name>")
@quiet
@gives(Bytes, "*/*")
async def asset(query: Query, caller: Caller, app: AppState, name: str) -> Reply:
    """Serve a file of the page whose name says what is in it."""
    return await _serve(app, caller, f"assets/{name}", "public, max-age=31536000, immutable")


async def _serve(app: AppState, caller: Caller, name: str, caching: str) -> Reply:
    config = app.config
    if config.static_path is not None:
        return await _file(config.static_path, name)
    if not config.ui:
        raise NotFoundError("This server has no page: it runs with --no-ui.")
    if name not in _files():
        raise NotFoundError("File Not Found")
    found = await trio.to_thread.run_sync(_read, name)
    # Weak, because the tag stands for the file packed and unpacked.
    headers = {**_HEADERS, "Cache-Control": caching, "ETag": f'W/"{found.digest}"'}
    headers["Content-Security-Policy"] = found.policy
    if parse_etags(caller.headers.get("If-None-Match")).contains_weak(found.digest):
        return Data(status=304, headers=headers, content_type=found.kind)
    body, takes = found.body, parse_accept_header(caller.headers.get("Accept-Encoding"))
    if found.packed is not None and takes.quality("gzip") > 0:
        body, headers["Content-Encoding"] = found.packed, "gzip"
    return Data(body=body, headers=headers, content_type=found.kind)


@cache
def _files() -> dict[str, Traversable]:
    """The files of the page by their paths below it."""
    built = files("trioserve") / "ui" / "dist"
    assets = {f"assets/{one.name}": one for one in (built / "assets").iterdir()}
    return {name: built / name for name in ("index.html", "licenses.txt", "sw.js")} | assets


@cache
def _read(name: str) -> _File:
    body = _files()[name].read_bytes()
    packed = gzip.compress(body, mtime=0)
    shorter = packed if len(packed) < 0.9 * len(body) else None
    digest = hashlib.sha256(body).hexdigest()[:16]
    is_sandbox = name.startswith("assets/") and name.endswith(".html")
    policy = _SANDBOX_POLICY if is_sandbox else _policy_of(body if name == "index.html" else b"")
    return _File(body, shorter, _KINDS[Path(name).suffix], digest, policy)


def _policy_of(page: bytes) -> str:
    """The policy that allows what stands in a page, by its hash."""
    allowed = {"script": "", "style": ""}
    for tag, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        allowed[tag.decode()] += f" 'sha256-{digest}'"
    return _POLICY.format(**allowed)


async def _file(directory: str, name: str) -> Reply:
    """Send a file of the directory; a link or a name that leads out of it is not found."""
    path = await trio.to_thread.run_sync(_inside, Path(directory), name)
    if path is None:
        raise NotFoundError("File Not Found")
    about = await trio.Path(path).stat()
    headers = {
        "Cache-Control": "no-cache",
        "Content-Length": str(about.st_size),
        "Last-Modified": http_date(about.st_mtime),
    }
    kind = get_content_type(guess_type(path.name)[0] or "application/octet-stream", "utf-8")
    return Pieces(pieces=_content(path), headers=headers, content_type=kind)


async def _content(path: Path) -> AsyncIterator[bytes]:
    async with await trio.open_file(path, "rb") as file:
        while piece := await file.read(_PIECE):
            yield piece


def _inside(directory: Path, name: str) -> Path | None:
    try:
        path = (directory / name).resolve(strict=True)
    except (OSError, ValueError):  # not there, too long, or with a NUL
        return None
    return path if path.is_file() and path.is_relative_to(directory.resolve()) else None


def static(directory: str) -> Callable[[str, str], Awaitable[Reply]]:
    """Make the function that serves a file of ``--path`` where there is no route."""

    async def serve(method: str, path: str) -> Reply:
        if method not in ("GET", "HEAD"):
            raise NotFoundError("File Not Found")
        name = path.removeprefix("/")
        return await _file(directory, name if not name.endswith("/") else f"{name}index.html")

    return serve
