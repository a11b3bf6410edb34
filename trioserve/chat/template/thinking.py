"""The variables that have a model think, and how much, in the names and values of its template.

Clients set llama-server's variables, ``enable_thinking`` and ``reasoning_effort``. A template that
has others for it, or fewer levels, gets those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

#: Renders a chat of the least kind with these variables; None when the template refuses.
Probe = Callable[[Mapping[str, Any]], str | None]

#: Levels of effort, from the lowest to the highest.
_LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")

#: Levels that switch thinking off.
_OFF = ("none", "no_think")

#: The names that templates have for the effort.
_EFFORTS = ("reasoning_effort", "reasoning_strength", "thinking_effort")

#: No template knows it.
_UNKNOWN = "q7unknown"


@attrs.frozen
class Switch:
    """A variable that switches thinking on and off, and its values."""

    name: str
    on: Any = True
    off: Any = False


#: The switches that there are. The first one that changes a prompt is the template's.
_SWITCHES = (
    Switch("enable_thinking"),
    Switch("thinking"),
    Switch("reasoning"),
    Switch("thinking_mode", "enabled", "disabled"),
    Switch("thinking_budget", -1, 0),
)


@attrs.frozen(kw_only=True)
class ThinkingVariables:
    """The variables of a template that are about thinking.

    Attributes:
        switch: the one that switches it on and off, if there is one.
        levels: the levels of each variable for the effort that takes only some.
    """

    switch: Switch | None = None
    levels: Mapping[str, Sequence[str]] = attrs.field(factory=dict)

    @property
    def is_flag(self) -> bool:
        """True if true and false switch thinking on and off."""
        return self.switch is not None and self.switch.on is True

    def fill(self, variables: dict[str, Any]) -> None:
        """Set what llama-server's variables ask for, unless the client has."""
        if "reasoning_effort" in variables:
            effort = variables["reasoning_effort"]
            for name in _EFFORTS:
                level = _nearest(effort, self.levels.get(name, ()))
                if name == "reasoning_effort":
                    variables[name] = level
                variables.setdefault(name, level)
        if (switch := self.switch) is None or "enable_thinking" not in variables:
            return
        if variables["enable_thinking"]:
            variables.setdefault(switch.name, switch.on)
        elif switch.name in _EFFORTS:
            variables[switch.name] = switch.off  # no other level has a meaning
        else:
            variables.setdefault(switch.name, switch.off)


def find(probe: Probe) -> ThinkingVariables:
    """Render with one value and another to find the variables."""
    levels = {}
    for name in _EFFORTS:
        if probe({name: _UNKNOWN}) is None and probe({}) is not None:
            levels[name] = [each for each in (*_OFF, *_LEVELS) if probe({name: each}) is not None]
    return ThinkingVariables(
        switch=next((each for each in _SWITCHES if _works(probe, each)), _level_off(levels)),
        levels=levels,
    )


def _works(probe: Probe, switch: Switch) -> bool:
    on, off = (probe({switch.name: value}) for value in (switch.on, switch.off))
    return on is not None and off is not None and on != off


def _level_off(levels: Mapping[str, Sequence[str]]) -> Switch | None:
    """The level that switches thinking off, where a template says that it takes one."""
    for name, known in levels.items():
        off = [each for each in _OFF if each in known]
        if off and len(known) > len(off):
            return Switch(name, known[-1] if "high" not in known else "high", off[0])
    return None


def _nearest(effort: Any, known: Sequence[str]) -> Any:
    """Give the level that is nearest to the effort, and of two the higher one."""
    levels = [each for each in _LEVELS if each in known]
    if effort not in _LEVELS or effort in known or not levels:
        return effort
    place = _LEVELS.index(effort)
    return min(levels, key=lambda each: (abs(_LEVELS.index(each) - place), -_LEVELS.index(each)))
