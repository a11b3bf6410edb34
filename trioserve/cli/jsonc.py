"""Changes of JSON files that people write: comments, and what is not changed, stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs

#: A part of a path: a key, or a field of an item of a list with the value that it has.
Step: TypeAlias = str | tuple[str, str]

_TOKEN = re.compile(
    r"(?P<blank>[\s\ufeff]+|//[^\n]*|/\*.*?\*/)|(?P<mark>[{}\[\]:,])"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<word>[^\s{}\[\]:,"/]+)',
    re.DOTALL,
)
#: A key without quotes, which JSON5 allows.
_BARE = re.compile(r"[A-Za-z_$][\w$]*", re.ASCII)

_MAX_DEPTH = 100


@attrs.frozen
class _Token:
    kind: str
    text: str
    start: int
    end: int


@attrs.frozen
class _Node:
    """A value, and its place. `members` have the starts of their keys, or of themselves."""

    start: int
    end: int
    members: Sequence[tuple[str, int, _Node]] = ()
    is_list: bool = False
    last: int = 0  # where the last token in it ends, as far as it is a container


class Document:
    """The text of a file.

    Args:
        text: JSON with comments, and with commas at the ends of lists. Empty: nothing yet.

    Raises:
        ValueError: it is something else; the message names the line.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = list(self._scan())
        self._at = 0
        self._root = self._value(0) if self._tokens else None
        if self._at < len(self._tokens):
            raise self._error(self._peek().start)

    def _scan(self) -> Iterator[_Token]:
        at = 0
        while at < len(self.text):
            found = _TOKEN.match(self.text, at)
            if found is None:
                raise self._error(at)
            at = found.end()
            assert found.lastgroup is not None
            if found.lastgroup != "blank":
                yield _Token(found.lastgroup, found[0], found.start(), at)

    def _error(self, at: int) -> ValueError:
        return ValueError(f"line {self.text.count(chr(10), 0, at) + 1} is not JSON")

    def _peek(self, *wanted: str) -> _Token:
        """The next token, which is one of these or anything."""
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is None or (wanted and token.text not in wanted):
            raise self._error(len(self.text) if token is None else token.start)
        return token

    def _next(self, *wanted: str) -> _Token:
        token = self._peek(*wanted)
        self._at += 1
        return token

    def _value(self, depth: int) -> _Node:
        token = self._next()
        if token.text not in ("{", "[") or token.kind != "mark":
            try:
                json.loads(token.text)
            except ValueError:
                raise self._error(token.start) from None
            return _Node(token.start, token.end)
        if depth > _MAX_DEPTH:
            raise self._error(token.end)
        return self._container(token, depth)

    def _container(self, opening: _Token, depth: int) -> _Node:
        is_list, members = opening.text == "[", list[tuple[str, int, _Node]]()
        closing = "]" if is_list else "}"
        last = opening
        while (token := self._next()).text != closing or token.kind != "mark":
            key = ""
            if is_list:
                self._at -= 1
            else:
                if token.kind != "string" and not _BARE.fullmatch(token.text):
                    raise self._error(token.start)
                key = json.loads(token.text) if token.kind == "string" else token.text
                self._next(":")
            members.append((key, token.start, self._value(depth + 1)))
            last = self._tokens[self._at - 1]
            if self._peek(",", closing).text == ",":
                last = self._next()
        return _Node(opening.start, token.end, members, is_list, last.end)

    # -- reading

    def value(self, path: Sequence[Step]) -> Any:
        """The value at a path. Raises KeyError if the path does not exist."""
        nodes = self._nodes(path)
        if len(nodes) <= len(path):
            raise KeyError(path)
        return self._read(nodes[-1])

    def n_there(self, path: Sequence[Step]) -> int:
        return len(self._nodes(path)) - 1

    def _nodes(self, path: Sequence[Step]) -> list[_Node]:
        """The values on the way, from the whole document on, as far as they exist."""
        nodes = [] if self._root is None else [self._root]
        for step in path if nodes else ():
            found = [
                one for key, _, one in nodes[-1].members if self._fits(nodes[-1], key, one, step)
            ]
            if not found:
                break
            nodes.append(found[-1])
        return nodes

    def _fits(self, parent: _Node, key: str, node: _Node, step: Step) -> bool:
        if isinstance(step, str):
            return not parent.is_list and key == step
        field, wanted = step
        inner = {name: one for name, _, one in node.members}
        return parent.is_list and field in inner and self._read(inner[field]) == wanted

    def _read(self, node: _Node) -> Any:
        if node.is_list:
            return [self._read(one) for _, _, one in node.members]
        if node.members or self.text[node.start] == "{":
            return {key: self._read(one) for key, _, one in node.members}
        return json.loads(self.text[node.start : node.end])

    # -- changes

    def put(self, path: Sequence[Step], value: Any) -> Document:
        """Set the value at a path, whose missing steps are made.

        Raises:
            ValueError: a step is there, but is no object or no list.
        """
        nodes = self._nodes(path)
        if len(nodes) > len(path):
            node = nodes[-1]
            return self._with(node.start, node.end, _written(value, self._indent_at(node.start)))
        for step in reversed(path[len(nodes) :]):
            value = {step: value} if isinstance(step, str) else [value]
        if not nodes:
            return Document(self.text + _written(value, "") + "\n")
        parent, step = nodes[-1], path[len(nodes) - 1]
        is_object = not parent.is_list and self.text[parent.start] == "{"
        if not (is_object if isinstance(step, str) else parent.is_list):
            raise ValueError(f"{named(path)} cannot be set: there is something else on the way")
        return self._add(parent, step, value)

    def _add(self, parent: _Node, step: Step, value: Any) -> Document:
        outer = self._indent_at(parent.start)
        inner = outer + ("\t" if outer.startswith("\t") or "\n\t" in self.text else "  ")
        if parent.members:
            inner = self._indent_at(parent.members[-1][1])
        member = _written(value, inner)
        if isinstance(step, str):
            member = f"{json.dumps(step)}: {member}"
        closing = parent.end - 1
        end = len(self.text[:closing].rstrip())  # behind the last comment
        comma = self.text[: parent.last].endswith(",") or not parent.members
        before = self.text[: parent.last] + ("" if comma else ",")
        rest = self.text[parent.last : end]
        return Document(f"{before}{rest}\n{inner}{member}\n{outer}{self.text[closing:]}")

    def remove(self, path: Sequence[Step], least: int = 0) -> Document:
        """Remove the value at a path, and containers that are empty without it.

        The first `least` steps stay. Without steps, nothing is left.
        """
        nodes = self._nodes(path)
        if len(nodes) <= len(path):
            return self
        depth = len(path)
        while depth - 1 > least and len(nodes[depth - 1].members) == 1:
            depth -= 1
        if not depth:
            return Document("")
        parent, node = nodes[depth - 1], nodes[depth]
        at = next(i for i, (_, _, one) in enumerate(parent.members) if one is node)
        start = parent.members[at][1]
        end = node.end
        if at + 1 < len(parent.members):
            end = parent.members[at + 1][1]
        elif at:  # the last one: with the comma before it
            start = parent.members[at - 1][2].end
            end = max(end, parent.last)
            kept = self.text[start : parent.members[at][1]].replace(",", "", 1).rstrip()
            return self._with(start, end, kept)
        else:
            start, end = parent.start + 1, parent.end - 1
        return self._with(start, end, "")

    def _with(self, start: int, end: int, text: str) -> Document:
        return Document(self.text[:start] + text + self.text[end:])

    def _indent_at(self, at: int) -> str:
        line = self.text[self.text.rfind("\n", 0, at) + 1 : at]
        return line[: len(line) - len(line.lstrip())]


def _written(value: Any, indent: str) -> str:
    step = "\t" if indent.startswith("\t") else 2
    return json.dumps(value, indent=step, ensure_ascii=False).replace("\n", f"\n{indent}")


def named(path: Sequence[Step]) -> str:
    """Write a path for people."""
    return ".".join(step if isinstance(step, str) else step[1] for step in path)


def as_path(steps: Sequence[Any]) -> tuple[Step, ...]:
    """Read a path from JSON, where pairs are lists."""
    return tuple(step if isinstance(step, str) else (step[0], step[1]) for step in steps)
