"""A configuration written as a command line, for a server in another process."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from trioserve.config.config import Config
from trioserve.config.table import FLAGS, Flag
from trioserve.errors import ConfigError


def words_of(config: Config) -> tuple[str, ...]:
    """Write flags that make this configuration; those for what is as by default are left out.

    Raises:
        ConfigError: a field has a value that no flag sets.
    """
    default = Config()
    words: list[str] = []
    for field in dict.fromkeys(flag.field for flag in FLAGS if not flag.sets):
        value = attrgetter(field)(config)
        if value != attrgetter(field)(default):
            words += _words(field, value)
    return tuple(words)


def _words(field: str, value: Any) -> tuple[str, ...]:
    """Find words that set a field to a value, by reading them again."""
    for flag in FLAGS:
        if flag.field != field or flag.sets:
            continue
        if flag.read is None:
            if value == flag.on:
                return (flag.names[-1],)
            if value == flag.off and flag.negative:
                return (flag.negative[-1],)
            continue
        for texts in _ways(flag, value):
            if _read(flag, texts) == value:
                return tuple(word for text in texts for word in (flag.names[-1], text))
    raise ConfigError(f"{field} is {value!r}, which no flag sets")


def _read(flag: Flag, texts: list[str]) -> Any:
    values: dict[str, Any] = {}
    try:
        for text in texts:
            flag.put_text(values, text, flag.field)
    except ConfigError:
        return None
    return values.get(flag.field)


def _ways(flag: Flag, value: Any) -> Iterator[list[str]]:
    """Texts that may mean a value."""
    if not isinstance(value, tuple):
        yield [str(value)]
        return
    yield [",".join(map(str, value))]
    yield [_row(value)]
    yield [";".join(map(str, value))]
    if flag.adds:
        yield [_row((each,)) for each in value]
        yield [_escaped(each) for each in value]
        yield [_bias(each) for each in value]


def _row(values: tuple[Any, ...]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow(values)
    return written.getvalue()


def _escaped(value: Any) -> str:
    text = str(value).replace("\\", "\\\\")
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _bias(value: Any) -> str:
    """Write a pair of a token and its bias."""
    match value:
        case (int(token), float(bias)):
            return f"{token}{bias:+}"
        case _:
            return str(value)
