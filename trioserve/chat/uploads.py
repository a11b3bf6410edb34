"""Files that clients have uploaded before, and name by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.errors import InvalidRequestError, UnknownFileError


class Upload(str):
    """The id of an uploaded file, with its name and content. As JSON it is the id alone."""

    name: str
    data: bytes

    @classmethod
    def of(cls, id_: str, name: str, data: bytes) -> Upload:
        made = cls(id_)
        made.name, made.data = name, data
        return made


def upload_of(fields: Mapping[str, Any], path: str) -> Upload:
    """Take the field ``file_id`` of an object that stands at a path.

    Raises:
        UnknownFileError: its file is not there.
        InvalidRequestError: the field is missing or not text. Both errors name it.
    """
    given, path = fields.get("file_id"), f"{path}.file_id"
    if isinstance(given, Upload):
        return given
    if not isinstance(given, str):
        raise InvalidRequestError.at(path, "is missing." if given is None else "must be text.")
    raise UnknownFileError.at(path, "names no file that is stored here.")
