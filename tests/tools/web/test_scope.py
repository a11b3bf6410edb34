"""The domains of a request, with paths."""

from __future__ import annotations

import pytest

from trioserve.media.fetch import parse_url
from trioserve.tools.web.scope import Domain


@pytest.mark.parametrize(
    ("domain", "url", "is_below"),
    [
        ("example.org", "http://a.example.org/b", True),
        ("example.org", "http://notexample.org/", False),
        ("example.org/blog/", "http://example.org/blog/?page=/../2", True),
        ("example.org/blog/", "http://example.org/blog/../private", False),
        ("example.org/blog/", "http://example.org/blog/%2e%2E/private", False),
        ("example.org/blog/", "http://example.org/a/..//BLOG/./", True),
        ("example.org/private", "http://example.org/%70rivate", True),
        ("example.org/a*/c", "http://example.org/a/b/c", True),
    ],
)
def test_a_path_is_as_servers_read_it(domain: str, url: str, is_below: bool) -> None:
    assert Domain.parse(domain, "x").has(parse_url(url)) == is_below
