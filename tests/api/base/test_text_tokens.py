"""The tokens of each piece of a message."""

from __future__ import annotations

from trioserve.api.base.text_tokens import TokensOfText, probs_of
from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments
from trioserve.server.stream import ChatChunk
from trioserve.testing.vocab import ByteVocab
from trioserve.types import Candidates, TokenProb, TokenProbs


class WordVocab(ByteVocab):
    """Tokens of more than a byte, of less than a character, and of none at all."""

    pieces = (b"", b"<think>", b"ab", b"b</think>c", b"\xc3", b"\xa9", b"d", b"</think>")


def tokens_of(tokens: list[int], *deltas: Delta) -> list[tuple[int, list[int]]]:
    found = TokensOfText()
    chosen = [TokenProb(token, WordVocab.pieces[token], 0.0) for token in tokens]
    found.add([TokenProbs(each, Candidates.of()) for each in chosen])
    return [(n, [each.chosen.id for each in probs]) for n, probs in found.take(deltas)]


def test_a_token_on_the_border_belongs_to_the_first() -> None:
    tokens = [0, 1, 2, 3, 6]
    assert tokens_of(tokens, ReasoningDelta("abb"), ContentDelta("cd")) == [(2, [2, 3]), (1, [6])]


def test_parts_of_a_character_go_together() -> None:
    assert tokens_of([4, 5, 6], ContentDelta("éd")) == [(3, [4, 5, 6])]


def test_a_truncated_piece_has_the_remaining_tokens() -> None:
    assert tokens_of([6, 6], ContentDelta("d\ufffd")) == [(2, [6, 6])]


def test_arguments_that_were_rewritten_take_nothing() -> None:
    deltas = (ToolCallArguments(0, "{}"), ContentDelta("d"))
    assert tokens_of([2, 6], *deltas) == [(0, []), (1, [6])]


def test_markers_have_no_place() -> None:
    def chunk(token: int, *deltas: Delta) -> ChatChunk:
        chosen = TokenProb(token, WordVocab.pieces[token], 0.0)
        return ChatChunk(deltas, (token,), (TokenProbs(chosen, Candidates.of()),))

    chunks = [
        chunk(1),
        chunk(2, ReasoningDelta("ab")),
        chunk(7),
        chunk(6, ContentDelta("d")),
        chunk(2, ContentDelta("ab")),
        chunk(0),
    ]
    assert [each.chosen.id for each in probs_of(chunks)] == [2, 6, 2]
