"""``trioserve_run_tools``: which tools the server runs for a chat, and how."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trioserve.api.base import readers
from trioserve.api.base.fields import MismatchError, boolean, field, json_type, one_of, structure
from trioserve.api.base.json_schema import of_class
from trioserve.errors import InvalidRequestError

#: The field.
NAME = "trioserve_run_tools"


@attrs.frozen(kw_only=True)
class RunTools:
    """What the server is to run. Whatever is not said is up to the configuration."""

    #: Names of tools, or patterns such as ``weather_*``; None: all that the server has.
    tools: tuple[str, ...] | None = None
    #: How many answers the model gives at most.
    max_steps: int | None = field(read=readers.steps, default=None)
    #: What becomes of calls that write: a person is asked, all are made, or none is.
    approval: Literal["ask", "all", "none"] | None = field(
        read=one_of("ask", "all", "none"), default=None
    )
    #: The folder that relative paths begin in, and where the tools run.
    cwd: str | None = None
    runtime: str | None = None


_KNOWN = tuple(attrs.fields_dict(RunTools))


@json_type(
    {
        "anyOf": [
            {"type": "boolean"},
            {**of_class(RunTools), "additionalProperties": False},
        ],
        "description": "Has the server run the tools that the model calls, and the model go on.",
    }
)
def run_tools(value: Any) -> RunTools | None:
    """Read the field: false is nothing, true is an object without fields.

    Raises:
        InvalidRequestError: a field within is unknown, has the wrong type or makes no sense.
    """
    if not isinstance(value, dict):
        try:
            return RunTools() if boolean(value) else None
        except MismatchError:
            raise MismatchError("true, false or an object") from None
    for name in value:
        if name not in _KNOWN:
            raise InvalidRequestError(
                f"'{NAME}.{name:.80}' is not known; there are {', '.join(_KNOWN)}.",
                param=f"{NAME}.{name:.80}",
            )
    return structure(RunTools, value, f"{NAME}.")
