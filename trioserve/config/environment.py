"""Environment variables, read into values of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.config import foreign
from trioserve.config.table import BY_VARIABLE, FALSE_WORDS, TRUE_WORDS, Flag
from trioserve.errors import ConfigError

#: Prefixes of the variables that are ours to read, and so ours to refuse.
_PREFIXES = ("LLAMA_ARG_", "TRIOSERVE_")


def read(environ: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """Read the variables that set fields, and add to `notes` what a person should know.

    Raises:
        ConfigError: a variable is not known, or has a value that cannot be used.
    """
    values: dict[str, Any] = {}
    for name, text in environ.items():
        flag = BY_VARIABLE.get(name)
        if text == "" or not (flag or name.startswith(_PREFIXES)):
            continue
        switched_off = BY_VARIABLE.get(_without_no(name))
        if flag is not None:
            _put(flag, values, text, name)
        elif switched_off is not None and switched_off.read is None:
            values[switched_off.field] = False  # whatever the text is
        else:
            _foreign(name, text, notes)
    return _vertex(environ) | values


def _vertex(environ: Mapping[str, str]) -> dict[str, Any]:
    """What Google's Vertex AI asks of a server that it runs. Our own variables win.

    Raises:
        ConfigError: the port is no number.
    """
    if environ.get("AIP_MODE") != "PREDICTION":
        return {}
    port = environ.get("AIP_HTTP_PORT") or "8080"
    if not port.isdecimal():
        raise ConfigError(f"AIP_HTTP_PORT: {port!r} is not an integer")
    routes = {
        "predict_route": environ.get("AIP_PREDICT_ROUTE") or "/predict",
        "health_route": environ.get("AIP_HEALTH_ROUTE") or "",
    }
    return {"port": int(port)} | {
        name: f"/{path.lstrip('/')}" for name, path in routes.items() if path
    }


def _without_no(name: str) -> str:
    """``LLAMA_ARG_NO_X`` switches off what ``LLAMA_ARG_X`` switches on."""
    return name.replace("LLAMA_ARG_NO_", "LLAMA_ARG_", 1)


def _put(flag: Flag, values: dict[str, Any], text: str, name: str) -> None:
    if flag.read is not None:
        flag.put_text(values, text, name)
    elif text in TRUE_WORDS | FALSE_WORDS:
        flag.put(values, flag.on if text in TRUE_WORDS else flag.off)
    else:
        raise ConfigError(f"{name} must be true or false, not {text!r}")


def _foreign(name: str, text: str, notes: list[str]) -> None:
    known = foreign.variables()
    if name in known:
        flag, opposite = known[name]
        meant = opposite if text in FALSE_WORDS else flag
    elif _without_no(name) in known:
        meant = known[_without_no(name)][1]
    else:
        hint = foreign.did_you_mean(name, BY_VARIABLE, known)
        raise ConfigError(f"{name} is not a variable of trioserve{hint}")
    if meant is not None:  # otherwise it says no to what is not there
        notes.append(foreign.note(meant, name, "variable"))
