"""Patterns that look ahead at their beginning, as several patterns that all have to match."""

from __future__ import annotations

import re

#: A character, an escaped one, or a class.
_ONE = r"(?:\\[^bBdDsSwWpPukxc0-9]|\\[dDsSwW]|\[(?:\\.|[^\]\\])+\]|[^\\()\[\]{}.*+?^$|])"
_MAX_CHARS = 2**12
_AROUND = re.compile(r"\(\?<?[=!]")
_BARE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|$)", re.DOTALL)


def without_lookahead(pattern: str) -> list[str]:
    """Take what a pattern looks ahead for apart from it: all of the patterns have to match.

    Gives the pattern alone if it looks ahead elsewhere, or in a way that cannot be written so.
    """
    if not pattern.startswith("^(?") or len(pattern) > _MAX_CHARS:
        return [pattern]
    rest, found = pattern[1:], []
    while rest.startswith(("(?=", "(?!")):
        if (end := _end_of_group(rest)) < 0:
            return [pattern]
        inner = rest[3 : end - 1]
        written = f"^(?:{inner})" if rest[2] == "=" else _without(inner)
        if not written:
            return [pattern]
        found.append(written)
        rest = rest[end:]
    if _alternates(rest) or rest.startswith(("*", "+", "?", "{")):
        return [pattern]
    if any(_AROUND.search(_BARE.sub("", one)) for one in (rest, *found)):
        return [pattern]
    return [f"^{rest}", *found]


def _without(inner: str) -> str:
    """Write a pattern of the texts that do not begin with another; empty if it cannot be."""
    found = re.fullmatch(rf"(\.\*)?({_ONE})(\2)?", inner)
    if found is None or (found[3] and not found[1]):
        return ""
    one = found[2]
    if not found[1]:
        return f"^(?:{_other(one)}|$)"
    # ``.*`` ends with the line: what comes behind it is free.
    others = _other(one, r"\n")
    body = f"(?:{one}?{others})*{one}?" if found[3] else f"{others}*"
    return rf"^{body}(?:\n[\s\S]*)?$"


def _other(one: str, *more: str) -> str:
    """Write the class of all other characters, but some more."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:-1] if one.startswith('[') else one}{''.join(more)}]"


def _alternates(pattern: str) -> bool:
    """Whether a pattern has alternatives outside all parentheses."""
    bare = _BARE.sub("x", pattern)
    while (shorter := re.sub(r"\([^()]*\)", "x", bare)) != bare:
        bare = shorter
    return "|" in bare


def _end_of_group(pattern: str) -> int:
    """Find the end of the group that a pattern begins with; negative if it has none."""
    depth, at = 0, 0
    while at < len(pattern):
        if (skipped := _BARE.match(pattern, at)) is not None:
            at = skipped.end()
            continue
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        at += 1
        if not depth:
            return at
    return -1
