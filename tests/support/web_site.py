"""A web server whose names stand for the addresses that a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import trio
from trio import serve_tcp

from trioserve.media.fetch import Dialer, Fetcher, FetchRules


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A whole answer; `length` is that of the body unless it says something else."""
    said = {"Content-Length": str(len(body))} | {n.replace("_", "-"): v for n, v in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in said.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@attrs.define
class Site:
    """A web server, and what names stand for: each look-up gets the next addresses."""

    port: int
    names: dict[str, list[Sequence[str]]]
    answers: dict[str, bytes] = attrs.Factory(dict)
    requests: list[str] = attrs.Factory(list)
    looked_up: list[str] = attrs.Factory(list)
    is_open_ended: bool = False  # an answer stays without its end
    endless: bytes = b""  # what is sent behind an answer, again and again
    n_open: int = 0

    async def getaddrinfo(self, host: bytes, port: int, *_: object) -> list[Any]:
        name = host.decode()
        self.looked_up.append(name)
        if name not in self.names:
            raise OSError("no such name")
        found = self.names[name]
        addresses = found.pop(0) if len(found) > 1 else found[0]
        return [(2, 1, 6, "", (address, port)) for address in addresses]

    async def handle(self, stream: trio.SocketStream | trio.SSLStream[Any]) -> None:
        self.n_open += 1
        try:
            head = b""
            while b"\r\n\r\n" not in head and (data := await stream.receive_some()):
                head += data
            self.requests.append(head.decode())
            path = head.split(b" ")[1].decode()
            await stream.send_all(self.answers[path])
            while self.endless:
                await stream.send_all(self.endless)
            while self.is_open_ended and await stream.receive_some():
                pass
        except (trio.BrokenResourceError, IndexError):
            pass  # the client has gone
        finally:
            self.n_open -= 1
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.aclose()

    def url(self, host: str = "files.test", path: str = "/a") -> str:
        return f"http://{host}:{self.port}{path}"

    def fetcher(self, *entries: str, **options: Any) -> Fetcher:
        entries = entries or (f".test:{self.port}=127.0.0.0/8",)
        dialer = Dialer(FetchRules(entries), options.pop("certificates", None))
        return Fetcher(dialer, **({"max_bytes": 10_000, "timeout": 20.0} | options))


@asynccontextmanager
async def serving_site(**fields: Any) -> AsyncIterator[Site]:
    """Serve one, and have all names of this run looked up there."""
    site = Site(0, {"files.test": [["127.0.0.1"]], "other.test": [["127.0.0.1"]]}, **fields)
    trio.socket.set_custom_hostname_resolver(site)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(serve_tcp, site.handle, 0, host="127.0.0.1"))
        site.port = listener.socket.getsockname()[1]
        yield site
        nursery.cancel_scope.cancel()
