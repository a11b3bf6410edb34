"""A `Config` from flags and variables, or what is said of them."""

from __future__ import annotations

import pytest

from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ConfigError


def read(*argv: str, **environ: str) -> Config:
    return parse(argv, environ).config


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv, environ)
    return caught.value.message
