"""``/v1/files``: the requests of batches, and their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Self

import attrs

from trioserve.api.base.answers import Bytes
from trioserve.api.base.body import Form
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import DATA as FILE_DATA, NAME, RequestBody, field
from trioserve.api.base.reply import Pieces, Reply, json
from trioserve.api.base.routes import FORM, Query, Routes
from trioserve.api.batches import DATA, FILE, File, file_body
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.listing import (
    QUERY,
    DeletedRecord,
    Page,
    PageOf,
    deleted,
)
from trioserve.api.stored.shelf import Shelf
from trioserve.errors import InvalidRequestError, NotFoundError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.store import Part, Record, Records

routes = Routes()

_PIECE = 2**18


class Files(PageOf):
    """Some files."""

    data: Sequence[File]


@attrs.frozen
class Upload:
    """A file in a form."""

    data: bytes
    name: str


@attrs.frozen(kw_only=True)
class FileRequest(RequestBody):
    """``POST /v1/files``, a form."""

    file: Upload = field(read=lambda value: value, schema=FILE_DATA)
    purpose: str = field(read=lambda value: value, schema={**NAME, "examples": ["batch"]})

    @classmethod
    def parse(cls, form: Form) -> Self:  # type: ignore[override]
        """Read a form. Raises InvalidRequestError, which names the field at fault."""
        purpose = form.fields.get("purpose", [""])[-1]
        if purpose != "batch":
            raise UnsupportedFieldError.at("purpose", 'must be "batch".')
        if "file" not in form.files:
            raise InvalidRequestError.at("file", "is required.")
        if any(name.startswith("expires_after") for name in form.fields):
            leave_out("expires_after", "--store-days says for how long a file is kept")
        name = form.names.get("file") or "file.jsonl"
        return cls(file=Upload(form.files["file"], name), purpose=purpose)


@routes.post("/v1/files")
@takes(FileRequest, content=FORM)
@gives(File)
async def upload(request: FileRequest, caller: Caller, app: AppState) -> Reply:
    """Store the requests of a batch: a file of JSON lines, as ``file`` of a form."""
    data, own = request.file.data, app.store.owner_of(caller.api_key)
    made = file_body(request.file.name, len(data), request.purpose)
    pieces = (Part(n, "", data[i : i + _PIECE]) for n, i in enumerate(range(0, len(data), _PIECE)))
    await app.store.add(made["id"], FILE, own, made, parts=(DATA, pieces))
    return json(made)


@routes.get("/v1/files")
@takes(None, query={**QUERY, "purpose": "list only files with this purpose"})
@gives(Files)
async def list_files(query: Query, caller: Caller, app: AppState) -> Reply:
    """List the files of the client."""
    purpose, page = query.get("purpose"), Page.of(query, default=10_000, most=10_000)
    return await page.records(
        Shelf.of(caller, app), FILE, lambda file: purpose in (None, file.body["purpose"])
    )


@routes.get("/v1/files/<id_>")
@gives(File)
async def show(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Describe a file."""
    return json((await Shelf.of(caller, app).find(FILE, id_)).body)


@routes.get("/v1/files/<id_>/content")
@gives(Bytes, "application/octet-stream")
async def content(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Give the content of a file."""
    shelf = Shelf.of(caller, app)
    file, store, held = await shelf.find(FILE, id_), shelf.store, shelf.held
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
    return Pieces(pieces=pieces(), headers=headers, content_type="application/octet-stream")


@routes.delete("/v1/files/<id_>")
@gives(DeletedRecord)
async def delete(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a file. A batch that was made of it continues."""
    await Shelf.of(caller, app).find(FILE, id_)
    await app.store.delete(id_)
    return deleted(FILE, id_)


async def data_of(shelf: Shelf, file: Record) -> bytes:
    """The content of a file. Raises as `Shelf.bodies`."""
    shelf.held.grow(file.body["bytes"])  # for the pieces, and for the whole
    data, after = bytearray(), -1
    while some := await shelf.look_up(partial(Records.some, id=file.id, side=DATA, after=after)):
        for part in some:
            data += part.body
        after = some[-1].n
    return bytes(data)
