"""Files of chats, in the form in which the page exports them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ids = itertools.count()


def chat_of(title: str, messages: Sequence[Mapping[str, Any]], *, at: int) -> dict[str, Any]:
    """Make a chat of questions and answers that follow one another, begun at `at`, in ms."""
    written: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        last = written[-1]["id"] if written else None
        base = {"id": f"m{next(_ids)}", "parent": last, "state": "done", "content": ""}
        role = ("user", "assistant")[number % 2]
        written.append(base | {"role": role, "createdAt": at + number * 60_000} | message)
    times = {"createdAt": at, "updatedAt": written[-1]["createdAt"]}
    leaf = written[-1]["id"]
    return {"id": f"c{next(_ids)}", "title": title, "leaf": leaf, "messages": written} | times


def write_chats(path: Path, chats: Iterable[Mapping[str, Any]]) -> Path:
    """Write chats to a file that the page can import."""
    content = {"format": "trioserve-chats", "version": 1, "chats": list(chats)}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
