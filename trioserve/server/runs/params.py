"""`RunParams`: what a run may do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.server.runs.events import RunCall
from trioserve.tools.tool import ToolCallContext

#: What is done with calls that may change something: "ask" waits for `Run.approve`, "all" runs
#: them, "none" refuses them. A function is asked, and says whether to run the call.
Approval: TypeAlias = Literal["ask", "all", "none"] | Callable[[RunCall], Awaitable[bool]]

_APPROVALS = ("ask", "all", "none")


def _check_steps(_instance: Any, _attribute: attrs.Attribute[Any], value: Any) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 1):
        raise InvalidRequestError(
            "'max_steps' must be a whole number from 1 on.", param="max_steps"
        )


def _check_approve(_instance: Any, _attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in _APPROVALS and not callable(value):
        raise InvalidRequestError(
            f"'approve' must be one of {', '.join(_APPROVALS)}, or an async function.",
            param="approve",
        )


@attrs.frozen(kw_only=True)
class RunParams:
    """How many answers a run may have, and what its tools may do.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    #: The most answers that the model gives, the last one included; None: as the configuration
    #: says. The calls of that one are run, too, so that a later run can go on from there.
    max_steps: int | None = attrs.field(default=None, validator=_check_steps)
    approve: Approval = attrs.field(default="ask", validator=_check_approve)
    #: The folder that the relative paths of built-in tools begin in; None: the tools' own.
    cwd: str | None = None
    #: Where built-in tools run, as in `Config.tools_runtime`; None: as the configuration says.
    runtime: str | None = None

    @property
    def place(self) -> ToolCallContext:
        """How its tools are called."""
        return ToolCallContext(cwd=self.cwd, runtime=self.runtime)


_NAMES = frozenset(attrs.fields_dict(RunParams))


def take_run(fields: dict[str, Any], base: RunParams | None) -> RunParams:
    """Make the parameters of a run of fields that a program passes by name."""
    changes = {name: fields.pop(name) for name in _NAMES & fields.keys()}
    return attrs.evolve(base or RunParams(), **changes)
