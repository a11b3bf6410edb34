"""The table of flags, and those of llama-server that are not in it."""

from __future__ import annotations

import contextlib
import logging

import attrs
import pytest
from hypothesis import given, strategies as st

from tests.support.configs import refused
from trioserve.cli.help import help_text
from trioserve.config import Config, unsupported
from trioserve.config.flags import BY_NAME, FLAGS, GROUPS, Flag
from trioserve.config.parse import from_environment, parse
from trioserve.errors import ConfigError
from trioserve.types import SamplingParams

OWN = [flag for one in FLAGS for flag in (*one.names, *one.negative)]


def test_every_field_can_be_set() -> None:
    fields = {one.field for one in FLAGS}
    assert fields >= {field.name for field in attrs.fields(Config)} - {"sampling"}
    sampling = {f"sampling.{field.name}" for field in attrs.fields(SamplingParams)}
    assert fields >= sampling - {"sampling.min_keep", "sampling.min_tokens"}


def test_no_flag_and_no_variable_is_there_twice() -> None:
    variables = [one.variable for one in FLAGS if one.variable]
    assert len(OWN) == len(set(OWN))
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


# -- flags of llama-server that are not ours


ACCEPTED = sorted(name for one in unsupported.table() for name in one.accepted)


@pytest.mark.parametrize("flag", ACCEPTED)
def test_a_flag_that_cannot_matter_is_noted(flag: str) -> None:
    found = unsupported.flags()[flag]
    value = [] if found.negative else ["2"]
    parsed = parse([flag, *value, "--port", "1"], {})
    assert parsed.config == Config(port=1)
    assert parsed.notes == (f"{flag} has no effect: {found.why}",)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--no-escape", "that trioserve does not have yet: escapes are"),
        ("--prio", "threads are left to the operating system; use taskset and nice"),
        ("--draft-p-split", "a draft is one line of guesses, not a tree"),
        ("--draft-max", "llama-server has removed it"),
    ],
)
def test_a_flag_is_refused_with_the_reason(flag: str, why: str) -> None:
    message = refused(flag, "1")
    assert message.startswith(f"{flag} is a flag of llama-server") and why in message


def test_the_table_of_unsupported_flags_is_sound() -> None:
    theirs = unsupported.flags()
    assert len(theirs) == sum(len(one.names) + len(one.negative) for one in unsupported.table())
    assert not set(theirs) & set(OWN)
    assert len(ACCEPTED) == 14
    assert all(one.why for one in theirs.values())
    assert all(flag.startswith("-") for flag in theirs)
    assert not set(unsupported.variables()) & {one.variable for one in FLAGS}


def test_a_note_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trioserve"):
        from_environment({"LLAMA_ARG_PERF": "1"})
    assert caplog.messages == ["LLAMA_ARG_PERF has no effect: timings are always measured"]
