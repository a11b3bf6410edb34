"""The changes of a tool in a file, as a unified diff for people. Takes bounded time and length."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import chain

#: "equal", "replace", "delete" or "insert", and the lines of both texts that it is about.
_Change = tuple[str, int, int, int, int]

_CONTEXT = 3  # lines
_MAX_COMPARED = 2**21  # characters
#: Characters of what a result shows, and of what a person approves. Of more, both ends are shown.
MAX_DIFF = 2**16
MAX_PREVIEW = 2**20
#: Characters that a line counts more than it has: it takes space on a page.
_LINE = 24
#: Lines of one text times lines of the other that difflib compares: between two lines that both
#: texts have, and in all.
_MAX_PAIRS = 10_000
_MAX_ALL_PAIRS = 1_000_000


def unified_diff(path: str, old: str | None, new: str, most: int = MAX_DIFF) -> str:
    """The diff between two texts of a file; `old` is None for a file that is not there yet.

    The middle of a diff with more than `most` characters is left out, and that of its long lines.
    A line that begins with ``[`` says how much of it.
    """
    source = old or ""
    head = _same_head(source, new)
    tail = _same_tail(source[head:], new[head:])
    texts = source[head : len(source) - tail], new[head : len(new) - tail]
    if sum(map(len, texts)) > _MAX_COMPARED:
        return opaque_diff(path)
    before, after = map(_lines, texts)
    header = [
        "--- /dev/null\n" if old is None else f"--- a/{_label(path)}\n",
        f"+++ b/{_label(path)}\n",
    ]
    matcher = _Known(_merged(_changes(before, after)))
    first = source.count("\n", 0, head)
    hunks = (_hunk(group, before, after, first) for group in matcher.get_grouped_opcodes(_CONTEXT))
    return "".join([*header, *_ends(chain.from_iterable(hunks), most)])


def opaque_diff(path: str) -> str:
    """The note that a file changes which is not text, or too large."""
    return f"Files a/{_label(path)} and b/{_label(path)} differ\n"


def _label(path: str) -> str:
    return "".join(one if one.isprintable() else "\ufffd" for one in path)


def _same_head(old: str, new: str) -> int:
    """The number of equal characters at the beginning, without the lines that are shown."""
    at = _largest(min(len(old), len(new)), lambda size: old[:size] == new[:size])
    for _ in range(_CONTEXT + 1):
        at = old.rfind("\n", 0, at)
        if at < 0:
            return 0
    return at + 1


def _same_tail(old: str, new: str) -> int:
    """The same at the end."""
    largest = min(len(old), len(new))
    at = len(old) - _largest(largest, lambda size: old[len(old) - size :] == new[len(new) - size :])
    for _ in range(_CONTEXT + 1):
        at = old.find("\n", at) + 1
        if at == 0:
            return 0
    return len(old) - at


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that `holds` accepts; it accepts all smaller ones, too."""
    return bisect_left(range(1, limit + 1), True, key=lambda size: not holds(size))


class _Known(SequenceMatcher[str]):
    """Changes that are known, for difflib to group."""

    def __init__(self, changes: list[_Change]) -> None:
        super().__init__()
        self._changes = changes

    def get_opcodes(self) -> list[_Change]:  # type: ignore[override]
        return self._changes


def _lines(text: str) -> list[str]:
    """The lines with their newlines. Nothing else ends a line."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _changes(old: list[str], new: list[str]) -> Iterator[_Change]:
    """Equal and different parts. Lines that are unique in both texts hold them together."""
    at_old = at_new = n_pairs = 0
    for next_old, next_new in [*_anchors(old, new), (len(old), len(new))]:
        size = (next_old - at_old) * (next_new - at_new)
        n_pairs += size
        compare = _compare if size <= _MAX_PAIRS and n_pairs <= _MAX_ALL_PAIRS else _replace
        for tag, i1, i2, j1, j2 in compare(old[at_old:next_old], new[at_new:next_new]):
            yield tag, at_old + i1, at_old + i2, at_new + j1, at_new + j2
        if next_old < len(old):
            yield "equal", next_old, next_old + 1, next_new, next_new + 1
        at_old, at_new = next_old + 1, next_new + 1


def _merged(changes: Iterable[_Change]) -> list[_Change]:
    """The same with one change for each run of equal lines, and none for no lines."""
    merged: list[_Change] = []
    for tag, i1, i2, j1, j2 in changes:
        if i1 == i2 and j1 == j2:
            continue
        if merged and merged[-1][0] == tag == "equal":
            _, i1, _, j1, _ = merged.pop()
        merged.append((tag, i1, i2, j1, j2))
    return merged


def _anchors(old: list[str], new: list[str]) -> list[tuple[int, int]]:
    """The most lines that are once in each text, and in the same order."""
    n_old, n_new = Counter(old), Counter(new)
    place = {line: number for number, line in enumerate(new) if n_new[line] == 1}
    pairs = [
        (number, place[line])
        for number, line in enumerate(old)
        if n_old[line] == 1 and line in place
    ]
    # The longest run of pairs whose second numbers increase.
    ends: list[int] = []
    tops: list[int] = []
    previous: list[int] = []
    for index, (_, second) in enumerate(pairs):
        length = bisect_left(ends, second)
        previous.append(tops[length - 1] if length else -1)
        ends[length : length + 1] = [second]
        tops[length : length + 1] = [index]
    longest = []
    index = tops[-1] if tops else -1
    while index >= 0:
        longest.append(pairs[index])
        index = previous[index]
    return longest[::-1]


def _compare(old: list[str], new: list[str]) -> Sequence[_Change]:
    return SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def _replace(old: list[str], new: list[str]) -> Sequence[_Change]:
    """The equal beginning and end of two long texts; all else is replaced."""
    head = _n_common(zip(old, new, strict=False))
    tail = _n_common(zip(reversed(old[head:]), reversed(new[head:]), strict=False))
    end_old, end_new = len(old) - tail, len(new) - tail
    return [
        ("equal", 0, head, 0, head),
        ("replace", head, end_old, head, end_new),
        ("equal", end_old, len(old), end_new, len(new)),
    ]


def _n_common(pairs: Iterable[tuple[str, str]]) -> int:
    number = 0
    for one, other in pairs:
        if one != other:
            break
        number += 1
    return number


def _hunk(changes: list[_Change], old: list[str], new: list[str], n_before: int) -> Iterator[str]:
    """The lines of a hunk, of a file that has some more lines before these."""
    (_, i1, _, j1, _), (_, _, i2, _, j2) = changes[0], changes[-1]
    yield f"@@ -{_range(n_before + i1, i2 - i1)} +{_range(n_before + j1, j2 - j1)} @@\n"
    for tag, i1, i2, j1, j2 in changes:
        if tag == "equal":
            yield from (" " + line for line in old[i1:i2])
        else:
            yield from ("-" + line for line in old[i1:i2])
            yield from ("+" + line for line in new[j1:j2])


def _range(begin: int, length: int) -> str:
    """Lines as the header of a hunk names them."""
    return f"{begin + bool(length)},{length}" if length != 1 else f"{begin + 1}"


def _ends(lines: Iterator[str], most: int) -> Iterator[str]:
    """The lines, or else those at both ends, with how much is between them."""
    room = most // 2
    place = 0, 0  # the next line of both texts
    tail: deque[str] = deque()
    n_lines = n_characters = tail_size = 0
    for line in lines:
        text = _line(line, most // 4)
        if not tail and len(text) + _LINE <= room:
            room -= len(text) + _LINE
            place = _after(place, text)
            yield text
            continue
        tail.append(text)
        tail_size += len(text) + _LINE
        while tail_size > most // 2 and len(tail) > 1:
            left = tail.popleft()
            tail_size -= len(left) + _LINE
            place = _after(place, left)
            n_lines += 1
            n_characters += len(left)
    if n_lines:
        yield f"[{n_lines} lines with {n_characters} characters are not shown]\n"
        if not tail[0].startswith("@"):
            yield f"@@ -{place[0]} +{place[1]} @@\n"
    yield from tail


def _line(line: str, most: int) -> str:
    """A line, or else both ends of it, and what has to be said of it."""
    text = line.removesuffix("\n")
    left = len(text) - most
    if left > 0:
        text = f"{text[: most // 2]}…{text[-(most // 2) :]}"
        text += f"\n[{left} characters of this line are not shown]"
    return f"{text}\n" if line.endswith("\n") else f"{text}\n\\ No newline at end of file\n"


def _after(place: tuple[int, int], text: str) -> tuple[int, int]:
    """The numbers of the next line of both texts, after a line of the diff."""
    old, new = place
    if text.startswith("@"):
        _, removed, added, _ = text.split()
        return abs(int(removed.split(",")[0])), int(added.split(",")[0])
    return old + (text[0] != "+"), new + (text[0] != "-")
