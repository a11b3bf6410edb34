"""``/v1/files`` in Anthropic's form, for clients that send its header: the same files."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

import attrs

from trioserve.api.anthropic.routes import VERSION
from trioserve.api.base.answers import Answer
from trioserve.api.base.body import Form
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import DATA, RequestBody, field
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import FORM, Query, Routes
from trioserve.api.batches import FILE
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.files import FormFile, add_file, content, file_in
from trioserve.api.stored.listing import (
    ANTHROPIC_QUERY,
    AnthropicPage,
    DeletedOfAnthropic,
    Page,
    moment,
    page_of_anthropic,
)
from trioserve.api.stored.shelf import Shelf
from trioserve.errors import InvalidRequestError
from trioserve.store import Records

routes = Routes()

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

    file: FormFile = field(read=lambda value: value, schema=DATA)

    @classmethod
    def parse(cls, form: Form) -> Self:  # type: ignore[override]
        """Read a form. Raises InvalidRequestError, which names the field at fault."""
        return cls(file=file_in(form, "unnamed"))


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
async def upload(request: MessageFileRequest, caller: Caller, app: AppState) -> Reply:
    """Store a file, as ``file`` of a form."""
    return json(_metadata(await add_file(request.file, "user_data", caller, app)))


@routes.get("/v1/files", header=VERSION)
@takes(
    None, query={**ANTHROPIC_QUERY, "page": "a next_page", "ids[]": "list these, all on one page"}
)
@gives(AnthropicPage)
async def list_files(query: Query, caller: Caller, app: AppState) -> Reply:
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
    """The different ids that a list is asked for. Raises InvalidRequestError: they are too many."""
    several = getattr(query, "getlist", None)  # a name may occur often in a URL
    ids = list(dict.fromkeys(several("ids[]") if several else ()))
    if len(ids) > _MAX_IDS:
        raise InvalidRequestError.at("ids", f"must be at most {_MAX_IDS}.")
    return ids


@routes.get("/v1/files/<id_>", header=VERSION)
@gives(FileMetadata)
async def show(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Describe a file."""
    return json(_metadata((await Shelf.of(caller, app).find(FILE, id_)).body))


routes.get("/v1/files/<id_>/content", header=VERSION)(content)


@routes.delete("/v1/files/<id_>", header=VERSION)
@gives(DeletedOfAnthropic)
async def delete(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a file."""
    await Shelf.of(caller, app).delete(FILE, id_)
    return json(DeletedOfAnthropic(id_, "file_deleted"))
