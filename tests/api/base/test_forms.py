"""Forms with files: what is read of them, and what is refused."""

from __future__ import annotations

from unittest.mock import AsyncMock

import httpx
import pytest

from trioserve.api.base.body import Form, Incoming, boundary_of, parse_form
from trioserve.api.base.limits import MAX_FORM_FIELDS, MAX_FORM_PARTS
from trioserve.errors import InvalidRequestError, PayloadTooLargeError
from trioserve.server.limits.memory import MemoryBudget


def written(fields: dict[str, list[str]], files: dict[str, bytes]) -> tuple[bytes, bytes]:
    """A form as httpx writes it, and its boundary."""
    sent = {name: ("any.wav", content) for name, content in files.items()}
    made = httpx.Request("POST", "http://any/", data=fields, files=sent)
    return made.read(), boundary_of(made.headers["content-type"])


#: The name of the file, as the client has it.
NAMES = {"file": "any.wav"}


@pytest.mark.parametrize("size", [0, 1, 65_000, 65_536, 300_000])
def test_forms_of_httpx_are_read(size: int) -> None:
    # Line breaks and dashes, as at the end of a part.
    content = (b"\r\n--x\r\n\n\r--" * (size // 10 + 1))[:size]
    fields = {"language": ["en"], "include[]": ["a", "b"], "prompt": ["Zoë\r\n日本"]}
    data, boundary = written(fields, {"file": content})
    assert parse_form(data, boundary) == Form(fields=fields, files={"file": content}, names=NAMES)


@pytest.mark.parametrize(
    "type_",
    [
        *("", "application/json", "multipart/form-data"),
        *("multipart/mixed; boundary=x", "text; boundary=x"),
    ],
)
def test_other_bodies_are_refused(type_: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be a form"):
        boundary_of(type_)


@pytest.mark.parametrize("cut", [5, 40, 150, 300])
def test_a_form_that_is_cut_short_is_refused(cut: int) -> None:
    data, boundary = written({"a": ["b"]}, {"file": b"c" * 200})
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        parse_form(data[:-cut], boundary)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nothing of the kind",
        b"--x\r\n\r\nno name\r\n--x--\r\n",
        b"--x\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--\r\n',
    ],
)
def test_an_invalid_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="form"):
        parse_form(body, b"x")


@pytest.mark.parametrize(
    "fields",
    [{"a": ["b"] * (MAX_FORM_PARTS + 1)}, {"a": ["b" * (MAX_FORM_FIELDS // 2)] * 3}],
)
def test_forms_have_limits(fields: dict[str, list[str]]) -> None:
    with pytest.raises(PayloadTooLargeError, match="The form has more than"):
        parse_form(*written(fields, {"file": b""}))


def test_the_head_of_a_part_has_a_limit() -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="a"\r\nX: ' + b"y" * 200_000
    with pytest.raises(PayloadTooLargeError):
        parse_form(head, b"x")


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({}, None),
        ({"stream": ["perhaps"]}, None),
        ({"stream": ["false", "TRUE"]}, True),
        ({"stream": ["0"]}, False),
    ],
)
async def test_flags_and_a_form_that_is_to_be_a_stream(
    fields: dict[str, list[str]], flag: bool | None
) -> None:
    data, boundary = written(fields, {"file": b"any"})
    with MemoryBudget(10**6).hold() as held:
        incoming = Incoming(
            method="POST",
            path="/v1/audio/transcriptions",
            receive=AsyncMock(return_value=data),
            held=held,
            content_type=f"multipart/form-data; boundary={boundary.decode()}",
        )
        form = await incoming.form()
        assert form.flag("stream") is flag
        incoming.ask_for_stream()
        assert (await incoming.form()).flag("stream") is True
