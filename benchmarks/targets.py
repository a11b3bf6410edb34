"""Which servers may be measured, and small questions asked of them outside the measurement."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from urllib.parse import urlsplit

import attrs

from benchmarks.plan import Address
from trioserve.bench.prompts import words


class TargetError(Exception):
    """The server can't be measured: a bad URL, a remote host, or no answer."""


@attrs.frozen
class Target:
    """A server to measure. `pid` is known when the harness started it."""

    name: str
    address: Address
    pid: int | None = None


def target_of(url: str, *, name: str = "", allow_remote: bool = False) -> Target:
    """Make a target from a base URL such as ``http://127.0.0.1:8080``; a final ``/v1`` is dropped.

    Raises:
        TargetError: the URL is not http, has no host, can't be resolved, or leads off this machine
            and `allow_remote` is not set.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise TargetError(f"{url}: {error}") from None
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
        raise TargetError(f"{url}: a base URL looks like http://127.0.0.1:8080")
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TargetError(f"{url}: {error.strerror}") from None
    # IPv4 first: "localhost" means both, and servers listen on 127.0.0.1 by default.
    hosts = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0])]
    if not allow_remote:
        for host in hosts:
            if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                raise TargetError(f"{url}: {host} is not this machine; --allow-remote permits it")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(name or parts.netloc, Address(hosts[0], port, prefix))


def ask(target: Target, method: str, path: str, body: object = None, timeout: float = 10.0) -> str:
    """Send one request outside the measurement and return the body of the answer.

    Raises:
        TargetError: there is no answer, or its status is not 200.
    """
    address = target.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        data = None if body is None else json.dumps(body)
        connection.request(method, address.prefix + path, data, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise TargetError(f"{target.name}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise TargetError(f"{target.name}: {path} answered {response.status}: {text[:200]}")
    return text


def tokens_per_word(target: Target, model: str = "benchmark") -> float:
    """Return how many tokens a word of `wire.words` is for a model, from ``/tokenize``.

    Raises:
        TargetError: the server does not answer, or answers something else.
    """
    body = {"model": model, "content": words(400, "tokens per word")}
    text = ask(target, "POST", "/tokenize", body, timeout=60.0)  # a router loads the model
    try:
        return len(json.loads(text)["tokens"]) / 400
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"{target.name}: /tokenize answered {text[:80]!r}") from None
