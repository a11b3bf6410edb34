"""Lark as clients write it, brought into the form that llguidance reads.

The schemas in it are checked as other schemas are, and the tokens must be those of the vocabulary.
Options that only a sampler could follow are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from trioserve.llama.grammar.json_schema import UnusableError, read_schema

_LEXEME = re.compile(
    r"""
    (?P<comment>(?:\#|//)[^\n]*)
  | (?P<string>"(?:\\.|[^"\\\n])*+")
  | (?P<regex>/(?:\\.|[^/\\])++/)
  | (?P<json>%json\b[ \t\r\n]*+)
  | (?P<options>%llguidance\b[ \t\r\n]*+(?!\{[ \t\r\n]*\}))
  | (?P<token><[^<>\s]++>)
  | (?P<attribute>\b(?:max_tokens|stop|temperature)\b(?=[ \t]*=))
    """,
    re.VERBOSE | re.DOTALL,
)
_ID = re.compile(r"<\[(\^?)([0-9]{1,12})\]>")


def to_llguidance(
    source: str, tokens: Callable[[str | int, bool], str | None], options: Any
) -> str:
    """Check a grammar in Lark, and write it as llguidance reads it.

    Args:
        source: Lark; its rule ``start`` is what the output must match.
        tokens: writes a token by its name or id, which may be negated; None if it does not exist.
        options: llguidance's, for JSON.

    Raises:
        UnusableError: it has something that cannot be enforced.
    """
    return "".join(_pieces(source, tokens, options))


def _pieces(
    source: str, tokens: Callable[[str | int, bool], str | None], options: Any
) -> Iterator[str]:
    at = 0
    while (found := _LEXEME.search(source, at)) is not None:
        yield source[at : found.start()]
        at = found.end()
        match found.lastgroup:
            case "json":
                schema, at = _schema(source, at)
                yield f"%json {json.dumps({**schema, 'x-guidance': options})}"
            case "token":
                yield _token(found[0], tokens)
            case "options":
                raise UnusableError("options of %llguidance are not supported")
            case "attribute":
                raise UnusableError(f"the attribute '{found[0]}' is not supported")
            case "comment":
                pass
            case _:
                yield found[0]
    yield source[at:]


def _schema(source: str, at: int) -> tuple[Any, int]:
    """Read the schema after ``%json``; returns where it ends, too."""
    try:
        schema, end = json.JSONDecoder().raw_decode(source, at)
    except RecursionError:
        raise UnusableError("the schema after %json is nested too deeply") from None
    except ValueError as error:
        raise UnusableError(f"what follows %json is not JSON: {error}") from None
    return read_schema(json.dumps(schema)), end


def _token(written: str, tokens: Callable[[str | int, bool], str | None]) -> str:
    if (by_id := _ID.fullmatch(written)) is not None:
        token = tokens(int(by_id[2]), bool(by_id[1]))
    elif written.startswith("<["):
        raise UnusableError(f"{written:.80} is not supported; name one token")
    else:
        token = tokens(written, False)
    if token is None:
        raise UnusableError(f"the vocabulary has no token {written:.80}")
    return token
