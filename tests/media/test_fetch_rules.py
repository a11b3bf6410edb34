"""The addresses that media may be fetched from."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from trioserve.errors import ConfigError, InvalidMediaError
from trioserve.media.fetch import FetchRules, Target, is_public, parse_url


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://example.org", Target("http", "example.org", 80, "/")),
        ("HTTPS://Example.ORG./a?b=c#d", Target("https", "example.org", 443, "/a?b=c")),
        ("https://example.org:8443/%20", Target("https", "example.org", 8443, "/%20")),
        ("http://[2606:4700::1111]/x", Target("http", "2606:4700::1111", 80, "/x")),
        ("http://9.9.9.9/x", Target("http", "9.9.9.9", 80, "/x")),
    ],
)
def test_a_url_is_read(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/x",
        "file:///etc/passwd",
        "gopher://example.org",
        "//example.org/x",
        "http:///x",
        "http://",
        "http://user@example.org/x",
        "http://example.org@10.0.0.1/x",
        "http://example.org:x/",
        "http://example.org:99999/",
        "http://example.org\\@10.0.0.1/",
        "http://example.org/a b",
        "http://example.org/\r\nHost: other",
        "http://exämple.org/",
        "http://[::1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1.1/",
        "http://a..b/",
        "http://-a/",
        "http://" + "a" * 300 + "/",
        "http://example.org/" + "a" * 10_000,
    ],
)
def test_a_url_that_is_ambiguous_or_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(InvalidMediaError, match="is at an address"):
        parse_url(url)


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111"])
def test_addresses_of_the_internet_are_public(text: str) -> None:
    assert is_public(ip_address(text))


#: Every kind of address that is not a computer of the internet.
NOT_PUBLIC = """
    0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 169.254.169.254
    172.16.0.1 172.31.255.255 192.0.0.8 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.51.100.1
    203.0.113.1 224.0.0.1 239.1.1.1 224.0.1.1 240.0.0.1 255.255.255.255 168.63.129.16
    :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1
    64:ff9b:1::a00:1 100::1 2001::1 2001:db8::1 2002:7f00:1:: 2002:0a00:0001::1 3fff::1 5f00::1
    fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1 ff0e::1 2606:4700::1%eth0
"""


@pytest.mark.parametrize("text", NOT_PUBLIC.split())
def test_no_other_address_is_public(text: str) -> None:
    assert not is_public(ip_address(text))


def allowed(rules: FetchRules, url: str, *addresses: str) -> bool:
    target = parse_url(url)
    try:
        rules.check_target(target)
        return rules.check_addresses(target, addresses) == list(addresses)
    except InvalidMediaError:
        return False


def test_the_list_names_hosts_and_those_below_a_name() -> None:
    rules = FetchRules(["example.org", ".Images.test", "cdn.test:8080"])
    assert allowed(rules, "http://example.org/", "9.9.9.9")
    assert allowed(rules, "https://a.b.images.test/", "9.9.9.9", "2606:4700::1")
    assert allowed(rules, "http://cdn.test:8080/", "9.9.9.9")
    assert not allowed(rules, "http://a.example.org/", "9.9.9.9")
    assert not allowed(rules, "http://images.test/", "9.9.9.9")
    assert not allowed(rules, "http://evilimages.test/", "9.9.9.9")
    assert not allowed(rules, "http://cdn.test/", "9.9.9.9")
    assert not allowed(rules, "http://example.org:8080/", "9.9.9.9")
    assert not allowed(rules, "http://example.org:443/", "9.9.9.9")


def test_an_entry_may_take_any_port() -> None:
    rules = FetchRules(["example.org:*", "127.0.0.1:*"], "--flag")
    for port in (80, 443, 22, 65535):
        assert allowed(rules, f"http://example.org:{port}/", "9.9.9.9")
        assert allowed(rules, f"http://127.0.0.1:{port}/", "127.0.0.1")
        assert not allowed(rules, f"http://example.org:{port}/", "127.0.0.1")
    with pytest.raises(InvalidMediaError, match="which --flag does not allow"):
        rules.check_target(parse_url("http://example.com/"))


def test_one_address_that_is_not_public_is_too_many() -> None:
    rules = FetchRules(["all"])
    assert allowed(rules, "http://example.org/", "9.9.9.9")
    assert not allowed(rules, "http://example.org/")
    assert not allowed(rules, "http://example.org/", "9.9.9.9", "10.0.0.1")
    assert not allowed(rules, "http://localhost/", "127.0.0.1")
    assert not allowed(rules, "http://[::ffff:127.0.0.1]/", "::ffff:127.0.0.1")


def test_private_addresses_have_to_be_allowed_by_name() -> None:
    rules = FetchRules(["files.internal=10.1.0.0/16", "127.0.0.1:8000", "[::1]:8000"])
    assert allowed(rules, "http://files.internal/", "10.1.2.3")
    assert not allowed(rules, "http://files.internal/", "10.2.2.3")
    assert not allowed(rules, "http://files.internal/", "10.1.2.3", "127.0.0.1")
    assert allowed(rules, "http://127.0.0.1:8000/", "127.0.0.1")
    assert allowed(rules, "http://[::1]:8000/", "::1")
    assert not allowed(rules, "http://127.0.0.1/", "127.0.0.1")
    assert not allowed(rules, "http://localhost:8000/", "127.0.0.1")


@pytest.mark.parametrize("entry", ["", "a b:x", "http://a", "a:99999999", "a=10.0.0.1/8", "a=b"])
def test_an_entry_that_makes_no_sense_is_an_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="media_urls"):
        FetchRules([entry])
