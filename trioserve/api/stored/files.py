"""``/v1/files``: the requests of batches, and their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import attrs
from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.answers import Bytes
from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.body import read_form
from trioserve.api.base.connection import current_request
from trioserve.api.base.fields import DATA as FILE_DATA, NAME, RequestBody, field
from trioserve.api.base.http import json_response
from trioserve.api.batches import DATA, FILE, File, file_body
from trioserve.api.openapi import gives, takes
from trioserve.api.stored.listing import (
    QUERY,
    DeletedRecord,
    Page,
    PageOf,
    current_owner,
    deleted,
    missing,
)
from trioserve.api.stored.reading import look_up
from trioserve.errors import InvalidRequestError, NotFoundError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.store import Part, Record, Records

blueprint = Blueprint("stored_files", __name__)

_PIECE = 2**18


class Files(PageOf):
    """Some files."""

    data: list[File]


@attrs.frozen(kw_only=True)
class FileRequest(RequestBody):
    """``POST /v1/files``, a form."""

    file: bytes = field(read=lambda value: value, schema=FILE_DATA)
    purpose: str = field(read=lambda value: value, schema={**NAME, "examples": ["batch"]})


@blueprint.post("/v1/files")
@takes(FileRequest, content="multipart/form-data")
@gives(File)
async def upload() -> Response:
    """Store the requests of a batch: a file of JSON lines, as ``file`` of a form."""
    form, own = await read_form(), current_owner()
    purpose = form.fields.get("purpose", [""])[-1]
    if purpose != "batch":
        raise UnsupportedFieldError.at("purpose", 'must be "batch".')
    data = form.files.get("file")
    if data is None:
        raise InvalidRequestError.at("file", "is required.")
    if any(name.startswith("expires_after") for name in form.fields):
        leave_out("expires_after", "--store-days says for how long a file is kept")
    made = file_body(form.names.get("file") or "file.jsonl", len(data), purpose)

    pieces = (Part(n, "", data[i : i + _PIECE]) for n, i in enumerate(range(0, len(data), _PIECE)))
    await current_app_state().store.add(made["id"], FILE, own, made, parts=(DATA, pieces))
    return json_response(made)


@blueprint.get("/v1/files")
@takes(None, query={**QUERY, "purpose": "list only files with this purpose"})
@gives(Files)
async def list_files() -> Response:
    """List the files of the client."""
    purpose = request.args.get("purpose")
    page = Page.of_request(default=10_000, most=10_000)
    return await page.records(FILE, lambda file: purpose in (None, file.body["purpose"]))


@blueprint.get("/v1/files/<id_>")
@gives(File)
async def show(id_: str) -> Response:
    """Describe a file."""
    return json_response((await find(id_)).body)


@blueprint.get("/v1/files/<id_>/content")
@gives(Bytes, "application/octet-stream")
async def content(id_: str) -> Response:
    """Give the content of a file."""
    file, store, held = await find(id_), current_app_state().store, current_request().held
    n_held = 0  # of the largest piece so far: what is counted cannot fail in the middle

    def hold(n_bytes: int) -> None:
        nonlocal n_held
        held.grow(max(n_bytes - n_held, 0))
        n_held = max(n_bytes, n_held)

    some = await store.do(partial(Records.some, id=id_, side=DATA), hold)

    async def pieces() -> AsyncIterator[bytes]:
        """Read a piece when the one before is sent."""
        nonlocal some
        left = file.body["bytes"]
        while left > 0:
            if not some:
                raise NotFoundError("The file has been deleted while it was sent.")
            piece, after = b"".join(part.body for part in some), some[-1].n
            some, left = [], left - len(piece)
            yield piece
            some = await store.do(partial(Records.some, id=id_, side=DATA, after=after), hold)

    headers = {"Content-Length": str(file.body["bytes"])}
    return Response(pieces(), headers=headers, content_type="application/octet-stream")


@blueprint.delete("/v1/files/<id_>")
@gives(DeletedRecord)
async def delete(id_: str) -> Response:
    """Delete a file. A batch that was made of it continues."""
    await find(id_)
    await current_app_state().store.delete(id_)
    return deleted(FILE, id_)


async def find(id_: str, param: str | None = None) -> Record:
    """Find a file of the client.

    Raises:
        NotFoundError: there is none.
        InvalidRequestError: the same, of the field `param`.
    """
    own = current_owner()
    found = await look_up(lambda records: records.find(id_, FILE, own))
    if found is None and param is not None:
        raise InvalidRequestError.at(param, "names no file.")
    if found is None:
        raise missing(FILE, id_)
    return found


async def data_of(file: Record) -> bytes:
    """The content of a file. Raises as `bodies`."""
    current_request().held.grow(file.body["bytes"])  # for the pieces, and for the whole
    data, after = bytearray(), -1
    while some := await look_up(partial(Records.some, id=file.id, side=DATA, after=after)):
        for part in some:
            data += part.body
        after = some[-1].n
    return bytes(data)
