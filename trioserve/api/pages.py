"""The page at ``/`` and its files, or the files that are served in its place.

What `make ui` built is served as it is: ``index.html`` is asked for each time, and all that it
names has a hash in its name, so that a browser keeps it for ever.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import cast

import attrs
import trio
from quart import Blueprint, request, send_file
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.exceptions import NotFound

from trioserve.api.base.answers import Bytes
from trioserve.api.base.app_state import current_app_state
from trioserve.api.openapi import gives
from trioserve.errors import NotFoundError

blueprint = Blueprint("pages", __name__)

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


@blueprint.get("/")
@gives(str, "text/html")
async def index() -> Response:
    """Serve the page, unless ``--no-ui`` or ``--path`` says otherwise."""
    return await _serve("index.html", "no-cache")


@blueprint.get("/licenses.txt")
@gives(str, "text/plain")
async def licenses() -> Response:
    """Serve the licenses of what the page is made with."""
    return await _serve("licenses.txt", "no-cache")


@blueprint.get("/sw.js")
@gives(str, "text/javascript")
async def worker() -> Response:
    """Serve a service worker that removes itself, and so what another server's page has left."""
    return await _serve("sw.js", "no-cache")


@blueprint.get("/assets/<name>")
@gives(Bytes, "*/*")
async def asset(name: str) -> Response:
    """Serve a file of the page whose name says what is in it."""
    return await _serve(f"assets/{name}", "public, max-age=31536000, immutable")


async def _serve(name: str, caching: str) -> Response:
    config = current_app_state().config
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
    if request.if_none_match.contains_weak(found.digest):
        return Response(status=304, headers=headers)
    body = found.body
    if found.packed is not None and request.accept_encodings.quality("gzip") > 0:
        body, headers["Content-Encoding"] = found.packed, "gzip"
    return Response(body, headers=headers, content_type=found.kind)


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


async def serve_static() -> Response | None:
    """Serve a file of ``--path`` where there is no route. To be done after the check of keys."""
    directory = current_app_state().config.static_path
    is_free = isinstance(request.routing_exception, NotFound)
    if directory is None or not is_free or request.method not in ("GET", "HEAD"):
        return None
    name = request.path.removeprefix("/")
    return await _file(directory, name if not name.endswith("/") else f"{name}index.html")
