"""Hosts and addresses: what is read, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trioserve.hosts import HostPort, is_local, parse_authority, parse_origin


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("A.b:1", "a.b", 1),
        ("localhost", "localhost", None),
        ("a.example.:80", "a.example", 80),
        ("a_b.c", "a_b.c", None),
        ("[::1]:80", "::1", 80),
        ("[::FFFF:127.0.0.1]", "::ffff:127.0.0.1", None),
        ("127.0.0.1:", "127.0.0.1", None),
    ],
)
def test_an_authority(text: str, host: str, port: int | None) -> None:
    assert parse_authority(text) == HostPort(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[::1", "::1", "[::1].evil.example", "[::1]evil", "[evil]", "a b", "a/b", "a@b",
        "a:b", "a:65536", "a:123456", "a\\b", "a%41", "a,b", ".a", "-", "a\n", "[1.2.3.4.5]",
    ],
)  # fmt: skip
def test_what_is_no_authority(text: str) -> None:
    assert parse_authority(text) is None
    assert parse_origin(f"http://{text}") is None


def test_an_origin_has_the_port_of_its_scheme() -> None:
    assert parse_origin("https://A.b") == ("https", HostPort("a.b", 443))
    assert parse_origin("http://a.b:81") == ("http", HostPort("a.b", 81))
    assert parse_origin("app://a") == ("app", HostPort("a", None))
    for wrong in ("null", "", "http://", "http://a/", "http://u@a", "//a", "http:a"):
        assert parse_origin(wrong) is None


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True), ("a.localhost", True), ("127.9.9.9", True), ("::1", True),
        ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False), ("10.0.0.1", False),
        ("localhost.evil.example", False), ("notlocalhost", False), ("", False),
        ("2130706433", False),
    ],
)  # fmt: skip
def test_what_is_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    found = parse_authority(text)
    assert found is None or parse_authority(f"{found.host}") is not None or ":" in found.host
