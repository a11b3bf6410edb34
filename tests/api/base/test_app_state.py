"""Responses by the id in their chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from trioserve.api.base.app_state import Responses, Running


class FakeStream:
    def __init__(self, *, ended: bool = False) -> None:
        self.mailbox = SimpleNamespace(ended=ended)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_response_is_found_by_its_client_while_it_is_sent() -> None:
    responses, stream, ended = Responses(), FakeStream(), FakeStream(ended=True)
    streams = cast(Any, [stream, ended])
    with responses.running("chatcmpl-1", Running(streams, "key", reasoning_control=True)):
        assert responses.find("chatcmpl-1", "other") is None
        assert responses.find("chatcmpl-2", "key") is None
        found = responses.find("chatcmpl-1", "key")
        assert found is not None
        assert found.live == [stream]
        found.cancel()
    assert stream.cancelled
    assert not ended.cancelled
    assert responses.find("chatcmpl-1", "key") is None
