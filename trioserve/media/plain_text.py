"""`plain`: texts of strangers, without the characters that people cannot see."""

from __future__ import annotations

import re

_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")

#: Control and format characters, those of private use, halves of pairs, and the tags and selectors
#: that can carry a hidden text. The two joiners stay: scripts and emoji need them.
_HIDDEN = re.compile(
    "[\0-\x08\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    "\ud800-\uf8ff\ufeff\ufff0-\ufffb\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)


def plain(text: str) -> str:
    """Remove what is hidden in a text. Its lines end with a line feed."""
    return _HIDDEN.sub("", _LINE_ENDS.sub("\n", text))
