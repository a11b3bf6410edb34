"""The table of flags, and what is made from it."""

from __future__ import annotations

import contextlib

import attrs
from hypothesis import given, strategies as st

from trioserve.cli.help import help_text
from trioserve.config import Config, unsupported
from trioserve.config.flags import BY_NAME, FLAGS, GROUPS, Flag
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.types import SamplingParams


def test_every_field_can_be_set() -> None:
    fields = {one.field for one in FLAGS}
    assert fields >= {field.name for field in attrs.fields(Config)} - {"sampling"}
    sampling = {f"sampling.{field.name}" for field in attrs.fields(SamplingParams)}
    assert fields >= sampling - {"sampling.min_keep", "sampling.min_tokens"}


def test_no_flag_and_no_variable_is_there_twice() -> None:
    flags = [flag for one in FLAGS for flag in (*one.names, *one.negative)]
    variables = [one.variable for one in FLAGS if one.variable]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))


_WORDS = st.sampled_from([*BY_NAME, *sorted(unsupported.flags()), "-", "--", "=", "4"])


@given(st.lists(_WORDS | st.text(max_size=8), max_size=6))
def test_any_command_line_gives_a_config_or_an_error(argv: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(argv, {}).config, Config)


@given(st.sampled_from([one for one in FLAGS if one.variable]), st.text(max_size=12))
def test_any_variable_gives_a_config_or_an_error(flag: Flag, text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse((), {flag.variable or "": text}).config, Config)


def test_help_has_every_flag() -> None:
    text = help_text()
    for one in FLAGS:
        assert one.group in GROUPS
        for flag in one.names:
            assert f" {flag}" in text
    assert "--config FILE" in text
    assert all(len(line) <= 100 for line in text.splitlines())
