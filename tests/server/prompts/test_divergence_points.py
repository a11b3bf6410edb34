"""From the messages of a chat to the checkpoints of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted_server import serve
from tests.support.scripts import NamedVocab
from trioserve.chat.template.builtin import CHATML
from trioserve.server import Server
from trioserve.server.prompts.text import divergence_points_of
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import byte_vocab
from trioserve.types import MediaChunk, Prompt

SYSTEM = "Be brief. " * 10
QUESTION = "Where is the library? " * 4
#: Tokens of the headers around a message, one for each byte.
HEADERS = len("<|im_end|>\n<|im_start|>assistant\n" * 2)


def uncuttable(**shape: Any) -> ScriptedBackend:
    return ScriptedBackend(
        lambda prompt: "yes", n_slots=2, n_seqs=9, n_ctx=4000, can_cut=False, **shape
    )


def chat(*turns: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return [{"role": "system", "content": system}, *said]


async def n_prefilled(server: Server, messages: list[dict[str, Any]], **fields: Any) -> int:
    return (await server.chat(messages, **fields)).finished.timings.prompt_n


@pytest.mark.parametrize(
    ("messages", "n_new"),
    [
        (chat(QUESTION), 0),
        (chat(QUESTION, "yes", "Why?"), 4),
        (chat("Who?" * 9), 36),
        (chat(QUESTION, "no, never", "Why?"), 13),
        (chat("Me too"), 6),
        (chat(QUESTION, "yes"), 3),
    ],
    ids=["same", "next turn", "edit", "thinking cut", "same system prompt", "continued"],
)
async def test_a_chat_goes_back_to_where_it_parts(
    messages: list[dict[str, Any]], n_new: int
) -> None:
    async with serve(uncuttable()) as server:
        assert await n_prefilled(server, chat(QUESTION)) > len(SYSTEM + QUESTION)
        prefilled = await n_prefilled(server, messages)
        assert n_new < prefilled <= n_new + HEADERS


async def test_checkpoints_can_be_switched_off() -> None:
    async with serve(uncuttable(), ctx_checkpoints=0) as server:
        assert not server.model.keeps_checkpoints
        first = await n_prefilled(server, chat(QUESTION))
        assert await n_prefilled(server, chat(QUESTION)) == first


async def test_a_long_prompt_has_one_every_so_many_tokens() -> None:
    async with serve(uncuttable(), checkpoint_min_step=100) as server:
        for tail, n_new in (("x" * 50, 550), ("y" * 50, 100)):
            done = await server.complete("z" * 450 + "z" * 50 + tail)
            assert done.finished.timings.prompt_n <= n_new


async def test_a_model_that_can_be_cut_gets_no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*args: object, **kwargs: object) -> None:
        raise AssertionError("a chat is rendered again for nothing")

    monkeypatch.setattr("trioserve.server.prompts.text.find_divergence_points", find)
    async with serve(ScriptedBackend(lambda prompt: "yes")) as server:
        assert not server.model.keeps_checkpoints
        await n_prefilled(server, chat(QUESTION))


@pytest.mark.parametrize("text", [CHATML, "a", "<|im_start|>user\nHi"])
def test_each_byte_is_a_token(text: str) -> None:
    places = range(len(text) + 1)
    prompt = Prompt(byte_vocab.tokenize(text))
    found = divergence_points_of(byte_vocab, [text], prompt, places, add_special=False)
    assert found == tuple(places)


def test_a_header_does_not_count() -> None:
    vocab = ScriptedBackend().vocab
    named = NamedVocab(ScriptedBackend())  # Z is a control token
    named.tokenize = vocab.tokenize
    text = "system Zuser\nHi there"
    prompt = Prompt(vocab.tokenize(text))
    start = text.index("Hi")
    places = divergence_points_of(named, [text], prompt, [start], add_special=False)
    assert places == (text.index("Z") + 1,)


def test_cells_of_media_count() -> None:
    """The projector adds tokens around an image, and one between two tiles."""
    pieces = ["A", "<marker>", "BBB", "<other>", "", "<third>", "CC"]
    tile = MediaChunk(kind="image", n_cells=10, n_positions=10, id="tile", content=None)
    #        A (tile | tile) BBB ( tile ) ( tile ) CC
    tokens = byte_vocab.tokenize("A(|)BBB()()CC")
    prompt = Prompt(tokens, media=[(2, tile), (3, tile), (8, tile), (10, tile)])
    text = "".join(pieces)
    inside = [text.index("BBB") + 1, text.index("BBB") + 3, text.index("CC") + 1]
    found = divergence_points_of(byte_vocab, pieces, prompt, inside, add_special=False)
    assert found == (5 + 20, 7 + 20, 10 + 40, 12 + 40)
    assert [prompt.keys[n - 1] for n in found] == [66, 66, tile.keys[-1], 67]
