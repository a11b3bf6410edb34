"""Whole numbers in texts of others: headers, queries, paths and files. One strict reader for all.

Python's `int` takes ``1_0``, ``٣`` and blanks, and raises on more than 4,300 digits; `isdigit`
takes ``²``, which `int` does not.
"""

from __future__ import annotations

import re

#: Leading zeros are no reason to read more digits than any number here has.
_DIGITS = re.compile("[0-9]{1,20}")


def whole_number(text: str | bytes, least: int = 0, most: int = 2**63 - 1) -> int | None:
    """Read decimal digits. None: the text is something else, or the number is out of bounds."""
    digits = text.decode("latin-1") if isinstance(text, bytes) else text
    if _DIGITS.fullmatch(digits) and least <= (number := int(digits)) <= most:
        return number
    return None
