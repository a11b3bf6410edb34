"""A `Config` from flags and variables, or what is said of them."""

from __future__ import annotations

import pytest

from trioserve.config import Config
from trioserve.config.parse import config_from
from trioserve.errors import ConfigError


def read(*argv: str, **environ: str) -> Config:
    return config_from(argv, environ)


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from(argv, environ)
    return caught.value.message
