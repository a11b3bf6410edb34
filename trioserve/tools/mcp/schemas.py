"""`problem_of`: what is wrong with a schema. Each chat would fail that has the tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import validator_for

#: Characters of a schema as JSON. A model reads them all, in each chat that has the tool.
_MAX_SCHEMA = 2**16


def problem_of(schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a schema of arguments; None: nothing. Slow for a schema that is long."""
    try:
        if len(json.dumps(schema)) > _MAX_SCHEMA:
            return f"the schema of its arguments has more than {_MAX_SCHEMA:,} characters"
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return f"the schema of its arguments is none: {error.message[:200]}"
    except RecursionError:
        return "the schema of its arguments is nested too deeply"
    return None
