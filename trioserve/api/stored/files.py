"""``/v1/files``: the requests of batches, and their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import attrs
from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.answers import BYTES
from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.body import read_form
from trioserve.api.base.fields import DATA as FILE_DATA, NAME, RequestBody, field
from trioserve.api.base.http import json_response
from trioserve.api.batches import DATA, FILE, file_body
from trioserve.api.openapi import gives, takes
from trioserve.api.stored import answers
from trioserve.api.stored.listing import QUERY, Page, current_owner, deleted, missing
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.store import Part, Record, Records, Store

blueprint = Blueprint("stored_files", __name__)

_PIECE = 2**18


@attrs.frozen(kw_only=True)
class FileRequest(RequestBody):
    """``POST /v1/files``, a form."""

    file: bytes = field(read=lambda value: value, schema=FILE_DATA)
    purpose: str = field(read=lambda value: value, schema={**NAME, "examples": ["batch"]})


@blueprint.post("/v1/files")
@takes(FileRequest, content="multipart/form-data")
@gives(answers.FILE)
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

    def write(records: Records) -> None:
        records.add(made["id"], FILE, own, made)
        pieces = (data[i : i + _PIECE] for i in range(0, len(data), _PIECE))
        records.append(made["id"], DATA, [Part(n, "", each) for n, each in enumerate(pieces)])

    await current_app_state().store.do(write)
    return json_response(made)


@blueprint.get("/v1/files")
@takes(None, query={**QUERY, "purpose": "list only files with this purpose"})
@gives(answers.FILES)
async def list_files() -> Response:
    """List the files of the client."""
    page, own = Page.of_request(default=10_000, most=10_000), current_owner()
    files = await current_app_state().store.do(
        lambda records: records.listed(FILE, own, limit=10_000, newest=False)
    )
    purpose = request.args.get("purpose")
    return page.respond(
        page.of([each.body for each in files if purpose in (None, each.body["purpose"])])
    )


@blueprint.get("/v1/files/<id_>")
@gives(answers.FILE)
async def show(id_: str) -> Response:
    """Describe a file."""
    return json_response((await find(id_)).body)


@blueprint.get("/v1/files/<id_>/content")
@gives(BYTES, "application/octet-stream")
async def content(id_: str) -> Response:
    """Give the content of a file."""
    file = await find(id_)
    headers = {"Content-Length": str(file.body["bytes"])}
    store = current_app_state().store
    pieces = _pieces(store, id_, await store.do(partial(_some, id_=id_)))
    return Response(pieces, headers=headers, content_type="application/octet-stream")


async def _pieces(store: Store, id_: str, parts: list[Part]) -> AsyncIterator[bytes]:
    while parts:
        yield b"".join(part.body for part in parts)
        parts = await store.do(partial(_some, id_=id_, after=parts[-1].n))


def _some(records: Records, *, id_: str, after: int = -1) -> list[Part]:
    return records.parts(id_, DATA, after=after, limit=64)


@blueprint.delete("/v1/files/<id_>")
@gives(answers.DELETED)
async def delete(id_: str) -> Response:
    """Delete a file. A batch that was made of it continues."""
    await find(id_)
    await current_app_state().store.do(lambda records: records.delete(id_))
    return deleted(FILE, id_)


async def find(id_: str, param: str | None = None) -> Record:
    """Find a file of the client.

    Raises:
        NotFoundError: there is none.
        InvalidRequestError: the same, of the field `param`.
    """
    own = current_owner()
    found = await current_app_state().store.do(lambda records: records.find(id_, FILE, own))
    if found is None and param is not None:
        raise InvalidRequestError.at(param, "names no file.")
    if found is None:
        raise missing(FILE, id_)
    return found


def data_of(records: Records, file: Record) -> bytes:
    """The content of a file."""
    return b"".join(part.body for part in records.parts(file.id, DATA))
