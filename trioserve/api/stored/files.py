"""``/v1/files``: the requests of batches, and their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import attrs
from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.answers import BYTES
from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.body import read_form
from trioserve.api.base.connection import current_request
from trioserve.api.base.fields import DATA as FILE_DATA, NAME, RequestBody, field
from trioserve.api.base.http import json_response
from trioserve.api.batches import DATA, FILE, file_body
from trioserve.api.openapi import gives, takes
from trioserve.api.stored import answers
from trioserve.api.stored.listing import QUERY, Page, current_owner, deleted, missing
from trioserve.api.stored.reading import bodies, look_up
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.server.limits.memory import MemoryReservation
from trioserve.store import Part, Record, Records, Ref, Store

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
    purpose = request.args.get("purpose")
    page = Page.of_request(default=10_000, most=10_000)
    return await page.records(FILE, lambda file: purpose in (None, file.body["purpose"]))


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
    refs = await look_up(lambda records: records.refs(id_, DATA))
    headers = {"Content-Length": str(file.body["bytes"])}
    pieces = _pieces(refs, current_app_state().store, current_request().held)
    return Response(pieces, headers=headers, content_type="application/octet-stream")


async def _pieces(
    refs: Sequence[Ref], store: Store, held: MemoryReservation
) -> AsyncIterator[bytes]:
    """Read one part at a time, when the one before is sent."""
    before = held.n_bytes
    for ref in refs:
        (part,) = await store.read([ref], held.grow)
        yield part.body
        held.shrink_to(before)


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
    found = await look_up(lambda records: records.find(id_, FILE, own))
    if found is None and param is not None:
        raise InvalidRequestError.at(param, "names no file.")
    if found is None:
        raise missing(FILE, id_)
    return found


async def data_of(file: Record) -> bytes:
    """The content of a file. Raises as `bodies`."""
    refs = await look_up(lambda records: records.refs(file.id, DATA))
    current_request().held.grow(sum(ref.size for ref in refs))  # for the pieces, and for the whole
    return b"".join(await bodies(refs))
