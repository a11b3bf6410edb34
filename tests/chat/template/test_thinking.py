"""The variables that have a template think, found by trying them."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.chat.template.render import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}]
STRICT = (
    "{%- if effort is defined and effort not in ['no_think', 'low', 'high'] -%}"
    "{{ raise_exception('no such effort') }}{%- endif -%}{{ effort }}"
)


def shown(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(CHAT, kwargs=variables)


@pytest.mark.parametrize(
    ("source", "on", "off"),
    [
        ("{{ enable_thinking }}", "True", "False"),
        ("{{ thinking }}", "True", "False"),
        ("{{ reasoning }}", "True", "False"),
        ("{{ thinking_mode }}", "enabled", "disabled"),
        ("{{ thinking_budget }}", "-1", "0"),
        (STRICT.replace("effort", "reasoning_effort"), "high", "no_think"),
        ("{{ messages[0].content }}", "Hi", "Hi"),
    ],
)
def test_the_switch(source: str, on: str, off: str) -> None:
    assert shown(source, enable_thinking=True) == on
    assert shown(source, enable_thinking=False) == off
    assert shown(source) not in (on, off) or on == off


def test_what_the_client_sets_stays() -> None:
    assert shown("{{ thinking_budget }}", enable_thinking=True, thinking_budget=512) == "512"
    strict = STRICT.replace("effort", "reasoning_effort")
    assert shown(strict, enable_thinking=True, reasoning_effort="low") == "low"
    assert shown(strict, enable_thinking=False, reasoning_effort="low") == "no_think"


@pytest.mark.parametrize("name", ["reasoning_effort", "reasoning_strength", "thinking_effort"])
def test_a_level_that_the_template_lacks_becomes_the_nearest(name: str) -> None:
    strict = STRICT.replace("effort", name)
    levels = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "max": "high"}
    for asked, level in levels.items():
        assert shown(strict, reasoning_effort=asked) == level
        assert shown(f"{{{{ {name} }}}}", reasoning_effort=asked) == asked
