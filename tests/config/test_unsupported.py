"""Flags of llama-server that are not ours."""

from __future__ import annotations

import logging

import pytest

from tests.support.configs import refused
from trioserve.config import Config, unsupported
from trioserve.config.flags import FLAGS
from trioserve.config.parse import from_environment, parse


def test_what_is_not_there_yet_is_refused() -> None:
    wanted = "--no-escape is a flag of llama-server that trioserve does not have yet: escapes are"
    assert refused("--no-escape", "x").startswith(wanted)


def test_what_is_not_there_yet_is_refused_with_the_reason() -> None:
    assert refused("--prio", "x").endswith(
        "does not have yet: threads are left to the operating system; use taskset and nice"
    )
    assert refused(LLAMA_ARG_DOCKER_REPO="x").endswith(
        "does not have yet: models come from the hub or from an address; see -hf and -mu"
    )


ACCEPTED = sorted(name for one in unsupported.table() for name in one.accepted)


@pytest.mark.parametrize("flag", ACCEPTED)
def test_what_cannot_matter_is_noted(flag: str) -> None:
    found = unsupported.flags()[flag]
    value = [] if found.negative else ["2"]
    parsed = parse([flag, *value, "--port", "1"], {})
    assert parsed.config == Config(port=1)
    assert parsed.notes == (f"{flag} has no effect: {found.why}",)


def test_the_table_of_unsupported_flags_is_sound() -> None:
    theirs = unsupported.flags()
    own = {flag for one in FLAGS for flag in (*one.names, *one.negative)}
    assert len(theirs) == sum(len(one.names) + len(one.negative) for one in unsupported.table())
    assert not set(theirs) & own
    assert len(ACCEPTED) == 14
    assert all(one.why for one in theirs.values())
    assert all(flag.startswith("-") for flag in theirs)
    assert not set(unsupported.variables()) & {one.variable for one in FLAGS}


def test_a_note_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trioserve"):
        from_environment({"LLAMA_ARG_PERF": "1"})
    assert caplog.messages == ["LLAMA_ARG_PERF has no effect: timings are always measured"]
