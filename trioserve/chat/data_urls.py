"""Data URLs and base64, as clients write them."""

from __future__ import annotations

import binascii
from urllib.parse import unquote, unquote_to_bytes

from trioserve.errors import InvalidMediaError

#: The longest URL of a file elsewhere, and the longest head of a data URL, in characters.
MAX_URL = 8192

#: Media types that say nothing: the data show what they are.
UNTYPED = ("", "application/octet-stream", "binary/octet-stream")

#: Characters of base64 that are decoded at once. Meanwhile no other thread runs.
_PIECE = 2**20


def split_data_url(url: str, param: str) -> tuple[str, bytes]:
    """Split a data URL into its media type, in lower case and without parameters, and its data.

    Raises:
        InvalidMediaError: it is no data URL, its data are not in base64 as it says, or it is empty.
    """
    head, comma, _ = url[:MAX_URL].partition(",")
    scheme, _, about = head.partition(":")
    media_type, *others = (one.strip() for one in about.lower().split(";"))
    if scheme.lower() != "data" or not comma:
        raise InvalidMediaError.at(
            param, "must be a data URL of the form 'data:image/png;base64,...'."
        )
    start = len(head) + 1
    if others[-1:] == ["base64"]:
        return media_type, decode_base64(url, param, start=start)
    if not (data := unquote_to_bytes(url[start:])):
        raise InvalidMediaError.at(param, "is empty.")
    return media_type, data


def decode_base64(text: str, param: str, *, start: int = 0) -> bytes:
    """Decode base64 from the character `start` on.

    White space, missing padding and what a URL writes with ``%`` are fine.

    Raises:
        InvalidMediaError: it is something else, or nothing.
    """
    if text.find("%", start) >= 0:
        text, start = unquote(text[start:]), 0
    decoded, rest = [], ""
    try:
        for begin in range(start, len(text), _PIECE):
            piece = rest + "".join(text[begin : begin + _PIECE].split())
            n_whole = len(piece) // 4 * 4
            decoded.append(binascii.a2b_base64(piece[:n_whole], strict_mode=True))
            rest = piece[n_whole:]
        if rest:
            decoded.append(binascii.a2b_base64(rest + "=" * (4 - len(rest)), strict_mode=True))
    except ValueError:  # also of characters that are not ASCII
        raise InvalidMediaError.at(param, "is not valid base64.") from None
    if not any(decoded):
        raise InvalidMediaError.at(param, "is empty.")
    return b"".join(decoded)


def data_of(text: str, param: str) -> bytes:
    """Decode base64, or the data of a data URL, which clients put into its place.

    Raises:
        InvalidMediaError: it is neither, or empty.
    """
    text = text.strip()
    if text[:5].lower() == "data:":
        return split_data_url(text, param)[1]
    return decode_base64(text, param)
