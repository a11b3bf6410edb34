"""The store in requests: how a response is stored, and the uploaded files that are named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.api.base import limits
from trioserve.api.base.body import SHORT_BODY
from trioserve.api.base.caller import Caller
from trioserve.chat.uploads import Upload
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import offload

if TYPE_CHECKING:
    from trioserve.api.base.models import Models


@attrs.frozen
class StoredAs:
    """The decision about storing a response.

    Attributes:
        id: of the response; empty: any.
        repeated: fields of the response that tell how it is stored.
        before: stored items, which stand before the client's.
    """

    id: str = ""
    repeated: Mapping[str, Any] = attrs.field(factory=dict)
    before: Sequence[Mapping[str, Any]] = ()


#: A response that is not stored.
NOT_STORED = StoredAs()


# -- uploaded files


#: The types of parts, sources and results that may be an uploaded file.
_KINDS = ("file", "input_file", "input_image", "computer_screenshot")


def _places(values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The objects in some values that have the id of a file."""
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
            if value.get("type") in _KINDS:
                some = (value, value.get("file"))
                yield from (one for one in some if isinstance(one, dict) and "file_id" in one)
        elif isinstance(value, list | tuple):
            left += value


async def bring(values: Sequence[Any], size: int, caller: Caller, models: Models) -> int:
    """Put the uploaded files that there are in the place of their ids in some values.

    `size` is about how many bytes these have as JSON. Returns the bytes of the files.

    Raises:
        InvalidRequestError: there are too many ids.
        TrioServeError: as `Models.uploads`.
    """
    ids = await offload(partial(_ids_in, values), size, SHORT_BODY)
    uploads = await models.uploads(ids, caller)
    n_bytes = sum(len(each.data) for each in uploads.values())
    caller.held.grow(await offload(partial(_put, values, uploads), size + n_bytes, SHORT_BODY))
    return n_bytes


def _ids_in(values: Iterable[Any]) -> list[str]:
    found = (place["file_id"] for place in _places(values))
    ids = {id_ for id_ in found if isinstance(id_, str) and len(id_) <= limits.MAX_NAME}
    if len(ids) > limits.MAX_UPLOADS:
        raise InvalidRequestError(
            f"The request names {len(ids)} files, and may name at most {limits.MAX_UPLOADS}."
        )
    return sorted(ids)


def _put(values: Iterable[Any], uploads: Mapping[str, Upload]) -> int:
    """Put files in their places; returns the bytes that their texts may take."""
    n_bytes = 0
    for place in _places(values):
        if (id_ := place["file_id"]) in uploads:
            place["file_id"] = upload = uploads[id_]
            # A text takes up to four bytes for each one, if a single character needs them.
            n_bytes += len(upload.data) * (1 if upload.data.isascii() else 4)
    return n_bytes
