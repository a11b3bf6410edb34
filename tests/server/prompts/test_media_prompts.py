"""Prompts with images and sound, in a program that has the server in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.media_files import av_file, image_file, wav_file
from tests.support.projectors import WordProjector
from tests.support.scripted_server import assert_at_rest, serve, within
from trioserve.chat.messages import Audio, Image, Video
from trioserve.chat.params import ChatParams
from trioserve.errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    InvalidMediaError,
    PayloadTooLargeError,
    QueueFullError,
    ServerClosingError,
    UnsupportedFieldError,
)
from trioserve.server import RequestContext, Server
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.media.loader import Wanted
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.stream import read_all
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.types import DecodedImage, DecodedMedia, MediaSource

PNG = image_file(size=(8, 4))
EACH = "{{% for m in messages %}}<{}>{{% endfor %}}"


def user(*parts: Any) -> dict[str, Any]:
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": said}


def serve_seeing(projector: ScriptedProjector, **settings: Any) -> Server:
    config = {
        name: settings.pop(name) for name in ("log_prompts_dir", "max_queue") & settings.keys()
    }
    backend = ScriptedBackend(lambda prompt: "It is red.", projector=projector, **settings)
    return serve(backend, **config)


class SlowLoader:
    """Makes white images as soon as it may, and says that they have `n_bytes`."""

    def __init__(self, server: Server, n_bytes: int = 96) -> None:
        self.n_loading = 0
        self.may_go_on = trio.Event()
        self.n_bytes = n_bytes
        server.lifecycle.services.media._loader = self

    async def load(
        self, sources: Sequence[MediaSource], wanted: Wanted, hold: MemoryReservation
    ) -> list[DecodedMedia]:
        """Wait, and make them."""
        hold.grow(self.n_bytes)
        self.n_loading += 1
        try:
            await self.may_go_on.wait()
        finally:
            self.n_loading -= 1
        return [DecodedImage(width=8, height=4, pixels=bytes(96), id="white") for _ in sources]


@pytest.mark.system
async def test_a_program_gives_bytes_and_paths(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(PNG)
    chat = [user("See", Image(tmp_path / "red.png"), Image(PNG), "hear", Audio(wav_file(0.5)))]
    backend = ScriptedBackend(str.upper, projector=WordProjector())
    async with serve(backend) as server:
        answer = await server.chat(chat)
        assert "SEE(IMAGE 8X4)(IMAGE 8X4)HEAR(SOUND 0.5S)" in answer.message.content
        assert await server.count_tokens(chat) == len(answer.prompt)
        prompt = MixedPrompt(["a", Image(PNG), "b"])
        assert (await server.complete(prompt)).text == "A(IMAGE 8X4)B"
        outputs = await read_all(
            server.stream_all([prompt, "c"], await server.params({}), context=RequestContext(), n=2)
        )
        assert [output.text for output in outputs] == [*["A(IMAGE 8X4)B"] * 2, "C", "C"]
        assert server.memory.n_held == 0


async def test_markers_stand_for_media_in_a_rendered_chat() -> None:
    async with serve_seeing(ScriptedProjector()) as server:
        rendered = await server.render([user("a", Image(PNG), "b", Image(PNG))])
        before, first, second = rendered.split("<__media_")
        assert before.endswith("a")
        marker = first.removesuffix("b")
        assert second.startswith(marker)


@pytest.mark.system
async def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    async with serve_seeing(WordProjector(hears=False)) as server:
        with pytest.raises(InvalidMediaError) as missing:
            await server.chat([user("a", Image(tmp_path / "none.png"))])
        assert missing.value.param == "messages[0].content[1]"
        with pytest.raises(UnsupportedFieldError) as deaf:
            await server.count_tokens([user(Audio(wav_file(0.5)))])
        assert deaf.value.param == "messages[0].content[0]"
        with pytest.raises(InvalidMediaError, match="too narrow") as narrow:
            await server.complete(MixedPrompt(["a", Image(image_file(size=(1, 4)))]))
        assert narrow.value.param == "prompt[1]"
        await assert_at_rest(server)


async def test_a_template_without_a_place_for_media() -> None:
    template = "{{ messages[-1].content }}"
    async with serve_seeing(ScriptedProjector(), chat_template=template) as server:
        chat = [user(Image(PNG)), {"role": "assistant", "content": "x"}, user("a")]
        with pytest.raises(UnsupportedFieldError) as caught:
            await server.chat(chat)
        assert caught.value.param == "messages[0].content[0]"


@pytest.mark.system
@pytest.mark.parametrize(
    ("template", "config"),
    [
        (EACH.format("{% for part in m.content %}{{ part.text }}{% endfor %}"), {}),
        (EACH.format("{{ m.content | trim }}"), {}),
        (EACH.format("{{ m.content | tojson }}"), {}),
        ("chatml", {"jinja": False}),
    ],
    ids=["parts", "text", "JSON", "C++"],
)
async def test_templates_of_each_kind(template: str, config: dict[str, Any]) -> None:
    backend = ScriptedBackend(str.upper, projector=WordProjector())
    async with serve(backend, chat_template=template, **config) as server:
        answer = await server.chat(
            [user("See", Image(PNG), "and", Video(av_file("mp4", video="libx264")))]
        )
        assert re.search(r"SEE\(IMAGE 8X4\)AND\(VIDEO OF \d+\)", answer.message.content)


@pytest.mark.system
@pytest.mark.parametrize("can_cut", [True, False])
async def test_the_next_turn_about_an_image_computes_what_is_new(
    can_cut: bool, tmp_path: Path
) -> None:
    projector = ScriptedProjector(n_cells=40, is_causal=can_cut)
    backend = {"can_cut": can_cut, "n_seqs": 9, "n_ctx": 4000}
    async with serve_seeing(projector, log_prompts_dir=str(tmp_path), **backend) as server:
        first = [user("What is in the picture?", Image(PNG), "Be brief.")]
        one, two = await read_all(
            server.stream_chats(first, await server.params({}), ChatParams(), n=2)
        )
        assert one.message == two.message
        assert len(one.prompt) == len(one.prompt.tokens) + 40
        assert one.prompt.n_positions == len(one.prompt)
        chat = [*first, {"role": "assistant", "content": "It is red."}, user("And its shape?")]
        again = await server.chat(chat)
        n_new = len(again.prompt) - len(one.prompt)
        assert again.finished.timings.prompt_n <= n_new + 60  # with headers, a byte each
        other = await server.chat([user("What is in the picture?", Image(PNG), "Say more.")])
        assert other.finished.timings.prompt_n < 60
        assert len(projector.encoded) == 1
        assert (await server.detokenize(one.prompt)).count("[image]") == 1
    assert all(path.read_text().count("[image]") == 1 for path in tmp_path.iterdir())


async def test_a_cancel_while_loading_leaves_nothing() -> None:
    async with serve_seeing(ScriptedProjector()) as server, trio.open_nursery() as nursery:
        loader = SlowLoader(server)
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_when_blocked, scope)
            await server.chat([user(Image(PNG))])
        assert scope.cancelled_caught
        assert (loader.n_loading, server.memory.n_held) == (0, 0)
        await assert_at_rest(server)


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


async def test_the_deadline_holds_while_loading(autojump_clock: trio.testing.MockClock) -> None:
    async with serve_seeing(ScriptedProjector()) as server:
        loader = SlowLoader(server)
        with pytest.raises(DeadlineExceededError):
            params, chat = await server.params({}), [user(Image(PNG))]
            async with server.stream_chats(chat, params, ChatParams(), context=within(3)):
                raise AssertionError("unreachable")
        assert (loader.n_loading, server.memory.n_held) == (0, 0)


async def _drain(server: Server, may_go_on: trio.Event, ends: list[str]) -> None:
    """Drain while an image is loaded. `ends` gets what ends, in order."""
    async with trio.open_nursery() as nursery:

        async def drain() -> None:
            await server.drain(60)
            ends.append("drain")

        nursery.start_soon(drain)
        await wait_all_tasks_blocked()
        assert ends == []
        with pytest.raises(ServerClosingError):
            await server.chat([user("new")])
        may_go_on.set()


@pytest.mark.parametrize("tools", [False, True])
async def test_a_drain_waits_for_requests_whose_media_are_loaded(tools: bool) -> None:
    ends: list[str] = []

    async def ask() -> None:
        chat = [user(Image(PNG))]
        answer = await (server.run(chat, [len_of]) if tools else server.chat(chat))
        assert answer.message.content == "It is red."
        ends.append("answer")

    async with serve_seeing(ScriptedProjector()) as server, trio.open_nursery() as nursery:
        loader = SlowLoader(server)
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert loader.n_loading == 1
        await _drain(server, loader.may_go_on, ends)
    assert sorted(ends) == ["answer", "drain"]


def len_of(text: str) -> int:
    """Count characters."""
    return len(text)


@pytest.mark.parametrize("tools", [False, True])
async def test_the_end_of_a_drain_ends_requests_whose_media_are_loaded(
    autojump_clock: trio.testing.MockClock, tools: bool
) -> None:
    async def ask() -> None:
        chat = [user(Image(PNG))]
        with pytest.raises(ServerClosingError):
            await (server.run(chat, [len_of]) if tools else server.chat(chat))
        errors.append("ended")

    errors: list[str] = []
    async with serve_seeing(ScriptedProjector()) as server, trio.open_nursery() as nursery:
        loader = SlowLoader(server)
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        await server.drain(60)
        await wait_all_tasks_blocked()
        assert (errors, loader.n_loading) == (["ended"], 0)


async def test_what_is_decoded_is_counted() -> None:
    async with serve_seeing(ScriptedProjector()) as server:
        loader = SlowLoader(server, n_bytes=10_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.chat, [user(Image(PNG))])
            await wait_all_tasks_blocked()
            assert server.memory.n_held == 10_000
            loader.may_go_on.set()
        assert server.memory.n_held == 0
        loader.n_bytes = server.memory.limit + 1
        with pytest.raises(PayloadTooLargeError):
            await server.chat([user(Image(PNG))])
        assert server.memory.n_held == 0


@pytest.mark.system
async def test_chunks_are_counted_in_place_of_what_was_decoded() -> None:
    projector = ScriptedProjector(n_cells=5, bytes_per_cell=1000)
    image = MixedPrompt([Image(PNG)])
    async with serve_seeing(projector) as server:
        params = await server.params({})
        held: dict[int, int] = {}
        for n in (1, 2):
            async with server.stream_all([image] * n, params, context=RequestContext()):
                held[n] = server.memory.n_held
        assert held[2] == 2 * held[1] > 10_000
        projector.bytes_per_cell = server.memory.limit // 5 + 1
        with pytest.raises(PayloadTooLargeError, match="max-request-memory"):
            await server.complete(image)
        assert server.memory.n_held == 0


async def test_nothing_is_loaded_for_a_full_queue() -> None:
    async with serve_seeing(ScriptedProjector(), n_slots=1, max_queue=0) as server:
        loader = SlowLoader(server)
        async with server.stream_chat([user("Hi")]):
            with pytest.raises(QueueFullError):
                await server.chat([user(Image(PNG))])
            assert loader.n_loading == 0


@pytest.mark.system
async def test_media_that_do_not_fit() -> None:
    async with serve_seeing(ScriptedProjector(n_cells=3000)) as server:
        with pytest.raises(ContextLengthExceededError):
            await server.chat([user(Image(PNG))])
        assert await server.count_tokens([user(Image(PNG))]) > 3000
        await assert_at_rest(server)
