"""``/v1/files``: the requests of batches and their answers, and files that messages name.

Clients that send Anthropic's header get its form of the same files.
"""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self

import attrs

from trioserve.api.anthropic.routes import VERSION
from trioserve.api.base.answers import Answer, Bytes
from trioserve.api.base.body import Form
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import DATA as FILE_DATA, NAME, RequestBody, field
from trioserve.api.base.reply import Pieces, Reply, json
from trioserve.api.base.routes import FORM, Query, Routes
from trioserve.api.batches import DATA, FILE, File, file_body
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.listing import (
    ANTHROPIC_QUERY,
    QUERY,
    AnthropicPage,
    DeletedOfAnthropic,
    DeletedRecord,
    Page,
    PageOf,
    deleted,
    moment,
    page_of_anthropic,
)
from trioserve.api.stored.shelf import Shelf, missing
from trioserve.chat.uploads import Upload
from trioserve.errors import InvalidRequestError, NotFoundError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.store import Part, Record, Records

routes = Routes()

_PIECE = 2**18

#: The purposes that a file may have. They do not limit its use.
_PURPOSES = ("batch", "user_data", "vision", "assistants")


class Files(PageOf):
    """Some files."""

    data: Sequence[File]


@attrs.frozen
class FormFile:
    """A file in a form."""

    data: bytes
    name: str


@attrs.frozen(kw_only=True)
class FileRequest(RequestBody):
    """``POST /v1/files``, a form."""

    file: FormFile = field(read=lambda value: value, schema=FILE_DATA)
    purpose: str = field(read=lambda value: value, schema={**NAME, "enum": [*_PURPOSES]})

    @classmethod
    def parse(cls, form: Form) -> Self:  # type: ignore[override]
        """Read a form. Raises InvalidRequestError, which names the field at fault."""
        purpose = form.fields.get("purpose", [""])[-1]
        if purpose not in _PURPOSES:
            named = '", "'.join(_PURPOSES)
            raise UnsupportedFieldError.at("purpose", f'must be one of "{named}".')
        return cls(file=_file_in(form, "file.jsonl"), purpose=purpose)


def _file_in(form: Form, name: str) -> FormFile:
    """Take the file of a form, by default with a name."""
    if "file" not in form.files:
        raise InvalidRequestError.at("file", "is required.")
    if any(each.startswith("expires_") for each in form.fields):
        leave_out("the expiry of a file", "--store-days says for how long one is kept")
    return FormFile(form.files["file"], form.names.get("file") or name)


@routes.post("/v1/files")
@takes(FileRequest, content=FORM)
@gives(File)
async def upload(request: FileRequest, caller: Caller, app: AppState) -> Reply:
    """Store a file, as ``file`` of a form: the requests of a batch, or what messages name."""
    return json(await _add(request.file, request.purpose, caller, app))


async def _add(file: FormFile, purpose: str, caller: Caller, app: AppState) -> dict[str, Any]:
    """Store a file; returns its body."""
    data, own = file.data, app.store.owner_of(caller.api_key)
    made = file_body(file.name, len(data), purpose)
    pieces = (Part(n, "", data[i : i + _PIECE]) for n, i in enumerate(range(0, len(data), _PIECE)))
    await app.store.add(made["id"], FILE, own, made, parts=(DATA, pieces))
    return made


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
    file = await shelf.find(FILE, id_)
    return await content_of(shelf, [(id_, file.body["bytes"])], "application/octet-stream")


async def content_of(shelf: Shelf, files: Sequence[tuple[str, int]], content_type: str) -> Reply:
    """Answer with the content of files, one after the other, by their ids and bytes."""
    store, held = shelf.store, shelf.held
    n_held = 0  # of the largest piece so far: what is counted cannot fail in the middle

    def hold(n_bytes: int) -> None:
        nonlocal n_held
        held.grow(max(n_bytes - n_held, 0))
        n_held = max(n_bytes, n_held)

    def read(id_: str, after: int) -> Awaitable[list[Part]]:
        return store.do(partial(Records.some, id=id_, side=DATA, after=after), hold)

    # Before the head is sent: what cannot be read is an error then.
    begun = [await read(id_, -1) for id_, _ in files[:1]]

    async def pieces() -> AsyncIterator[bytes]:
        """Read a piece when the one before is sent."""
        for id_, left in files:
            some = begun.pop() if begun else await read(id_, -1)
            while left > 0:
                if not some:
                    raise NotFoundError("The file has been deleted while it was sent.")
                piece, after = b"".join(part.body for part in some), some[-1].n
                some, left = [], left - len(piece)
                yield piece
                some = await read(id_, after)

    headers = {"Content-Length": str(sum(n_bytes for _, n_bytes in files))}
    return Pieces(pieces=pieces(), headers=headers, content_type=content_type)


@routes.delete("/v1/files/<id_>")
@gives(DeletedRecord)
async def delete(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a file. A batch that was made of it continues."""
    await Shelf.of(caller, app).delete(FILE, id_)
    return deleted(FILE, id_)


async def read_uploads(app: AppState, ids: Sequence[str], caller: Caller) -> Mapping[str, Upload]:
    """Read files of a caller by their ids; what others have is not found. See `Models.uploads`."""
    found: dict[str, Upload] = {}
    shelf = Shelf.of(caller, app)
    for id_ in ids:
        with suppress(NotFoundError):
            file = await shelf.find(FILE, id_)
            found[id_] = Upload.of(id_, file.body["filename"], await data_of(shelf, file))
    return found


async def data_of(shelf: Shelf, file: Record) -> bytes:
    """The content of a file. Raises as `Shelf.bodies`, also if it was deleted meanwhile."""
    shelf.held.grow(file.body["bytes"])  # for the pieces, and for the whole
    data, after = bytearray(), -1
    while some := await shelf.look_up(partial(Records.some, id=file.id, side=DATA, after=after)):
        for part in some:
            data += part.body
        after = some[-1].n
    if len(data) != file.body["bytes"]:
        raise missing(FILE, file.id)
    return bytes(data)


# -- in Anthropic's form, for clients that send its header: the same files


#: The most ids that a list is asked for.
_MAX_IDS = 100


class FileMetadata(Answer, kw_only=True):
    """A file as Anthropic's clients see it."""

    id: str
    type: Literal["file"] = "file"
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    downloadable: bool = True
    expires_at: None = None


@attrs.frozen(kw_only=True)
class MessageFileRequest(RequestBody):
    """``POST /v1/files``, a form."""

    file: FormFile = field(read=lambda value: value, schema=FILE_DATA)

    @classmethod
    def parse(cls, form: Form) -> Self:  # type: ignore[override]
        """Read a form. Raises InvalidRequestError, which names the field at fault."""
        return cls(file=_file_in(form, "unnamed"))


def _metadata(body: Mapping[str, Any]) -> FileMetadata:
    kind, _ = mimetypes.guess_type(body["filename"])
    return FileMetadata(
        id=body["id"],
        filename=body["filename"],
        mime_type=kind or "application/octet-stream",
        size_bytes=body["bytes"],
        created_at=moment(body["created_at"]),
    )


@routes.post("/v1/files", header=VERSION)
@takes(MessageFileRequest, content=FORM)
@gives(FileMetadata)
async def upload_of_messages(request: MessageFileRequest, caller: Caller, app: AppState) -> Reply:
    """Store a file, as ``file`` of a form."""
    return json(_metadata(await _add(request.file, "user_data", caller, app)))


@routes.get("/v1/files", header=VERSION)
@takes(
    None, query={**ANTHROPIC_QUERY, "page": "a next_page", "ids[]": "list these, all on one page"}
)
@gives(AnthropicPage)
async def list_of_messages(query: Query, caller: Caller, app: AppState) -> Reply:
    """List the files of the client, the newest first."""
    shelf = Shelf.of(caller, app)
    if not (ids := _ids_in(query)):
        page = Page.of_anthropic(query)
        return await page.records(
            shelf, FILE, entry=lambda file: _metadata(file.body), form=page_of_anthropic
        )
    find = partial(Records.find, kind=FILE, owner=shelf.owner)
    found = await shelf.look_up(lambda records: [find(records, id=id_) for id_ in ids])
    return json(page_of_anthropic([_metadata(each.body) for each in found if each is not None]))


def _ids_in(query: Query) -> list[str]:
    """The different ids that a list is asked for."""
    several = getattr(query, "getlist", None)  # a name may occur often in a URL
    ids = list(dict.fromkeys(several("ids[]") if several else ()))
    if len(ids) > _MAX_IDS:
        raise InvalidRequestError.at("ids", f"must be at most {_MAX_IDS}.")
    return ids


@routes.get("/v1/files/<id_>", header=VERSION)
@gives(FileMetadata)
async def show_metadata(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Describe a file."""
    return json(_metadata((await Shelf.of(caller, app).find(FILE, id_)).body))


routes.get("/v1/files/<id_>/content", header=VERSION)(content)


@routes.delete("/v1/files/<id_>", header=VERSION)
@gives(DeletedOfAnthropic)
async def delete_of_messages(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a file."""
    await Shelf.of(caller, app).delete(FILE, id_)
    return json(DeletedOfAnthropic(id_, "file_deleted"))
