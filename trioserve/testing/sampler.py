"""A sampler that says what a script says, and a constraint that looks at its output."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trioserve.engine.reasoning import TriggerScanner
from trioserve.errors import InvalidRequestError, OutputError
from trioserve.testing.vocab import EOS, byte_vocab
from trioserve.types import (
    Adapters,
    Candidates,
    CellKey,
    Constraint,
    Grammar,
    TokenId,
    TokenProb,
    TokenProbs,
)

if TYPE_CHECKING:
    from trioserve.testing.backend import ScriptedBackend


class ScriptedConstraint(Constraint):
    """Looks at an output when it is complete. Of a JSON Schema it knows that it makes JSON.

    Of grammars for tool calls it knows nothing.
    """

    def __init__(self, grammar: Grammar) -> None:
        super().__init__(grammar)
        if grammar.kind == "gbnf":
            raise InvalidRequestError("A script knows no GBNF.", param=grammar.param)
        try:
            if grammar.kind == "json_schema":
                json.loads(grammar.source)
            self._pattern = re.compile(grammar.source if grammar.kind == "regex" else "")
        except (ValueError, re.error) as error:
            message = f"'{grammar.param}' cannot be used: {error}."
            raise InvalidRequestError(message, param=grammar.param) from error

    def check(self, output: str) -> None:
        """Raise EngineError unless the grammar allows the output."""
        scanner = TriggerScanner(self.grammar.thinking, self.grammar.triggers)
        rest = scanner.feed(output.encode())
        if self.grammar.kind == "tools":  # a script says what it says of them
            return
        if rest is None and self.grammar.triggers and not self.grammar.required:
            return
        output = "<nothing>" if rest is None else rest.decode()
        if self.grammar.kind == "regex":
            follows = self._pattern.fullmatch(output) is not None
        else:
            try:
                value = json.loads(output)
                follows = self.grammar.kind == "json_schema" or isinstance(value, dict)
            except ValueError:
                follows = False
        if not follows:
            raise OutputError(f"The script does not follow the grammar: {output!r}")


class ScriptedSampler:
    """Says what the script says after the prompt, byte by byte, and then EOS."""

    def __init__(
        self,
        backend: ScriptedBackend,
        prompt: Sequence[TokenId],
        constraint: ScriptedConstraint | None = None,
    ) -> None:
        self._backend = backend
        self._constraint = constraint
        self._tokens = list(prompt)
        self._prompt: list[CellKey] | None = None  # as it is in the KV cache, with media
        self._said: list[TokenId] = []
        self._adapters = backend.current_adapters
        self._reply = b""
        if backend.projector is None:
            self._read(self._tokens)
        self._seq: int | None = None  # that it is told of
        self.closed = False

    def _read(self, prompt: list[CellKey]) -> None:
        """Ask the script. Where there may be media, that is when the KV cache shows them."""
        assert [key for key in prompt if key >= 0] == self._tokens, "the prompt is another one"
        self._prompt = prompt
        reply = self._backend.script(self._backend.chunks.text(prompt))
        self._reply = bytes(self._said) + (_prefix(self._adapters) + reply).encode()

    def attach(self, seq: int) -> None:
        """Take the sequence, which no other sampler has."""
        assert not self.closed and self._seq in (None, seq), "in two sequences"
        assert self._backend.samplers.setdefault(seq, self) is self, "two for a sequence"
        self._seq = seq

    def detach(self) -> None:
        """Give it back."""
        if self._seq is not None:
            del self._backend.samplers[self._seq]
            self._seq = None

    def sample(self, row: int) -> TokenId:
        """Look at the KV sequence of the row, and say what comes next."""
        assert not self.closed, "the sampler is closed"
        assert row in self._backend.logits, f"row {row} has no logits"
        seq, n_held = self._backend.logits[row]
        assert self._seq in (None, seq), "the sampler was told of another sequence"
        held = self._backend.sequences[seq][:n_held]
        made_with = set(self._backend.made_with[seq])
        assert made_with == {self._adapters}, "the KV cache was computed with other adapters"
        if self._prompt is None:
            self._read(held[: len(held) - len(self._said)])
        assert self._prompt is not None
        text = self._prompt + self._said
        n_same = len(held) if len(held) == len(text) else len(held) // 2  # it was shifted
        assert held[-n_same:] == text[-n_same:], "the KV cache holds another text"
        n_said = len(self._said)
        token = self._reply[n_said] if n_said < len(self._reply) else EOS
        self._said.append(token)
        if token == EOS and self._constraint is not None:
            self._constraint.check(self._reply.decode())
        return token

    def sample_with_probs(self, row: int, n: int, *, post: bool) -> tuple[TokenId, TokenProbs]:
        """Be sure of everything."""
        token = self.sample(row)
        chosen = TokenProb(token, byte_vocab.pieces[token], 0.0)
        return token, TokenProbs(chosen, Candidates.of(*[chosen] * min(n, 1)))

    def accept(self, token: TokenId) -> None:
        """Say something else, and go on with the script after it."""
        n_said = len(self._said)
        self._reply = self._reply[:n_said] + bytes([token]) + self._reply[n_said:]
        self._said.append(token)

    def forced(self, n_max: int) -> list[TokenId]:
        """Say what the backend says has to follow."""
        n_said = len(self._said)
        rest = self._reply[n_said:]
        tokens = list(rest[: min(n_max, self._backend.n_forced(self._reply[:n_said].decode()))])
        self._said += tokens
        return tokens

    def probs(self, row: int, token: TokenId, n: int, *, post: bool) -> TokenProbs:
        """Be sure of it."""
        chosen = TokenProb(token, byte_vocab.pieces[token], 0.0)
        return TokenProbs(chosen, Candidates.of(*[chosen] * min(n, 1)))

    def close(self) -> None:
        """Count the sampler as freed."""
        if not self.closed:
            self.detach()
            self.closed = True
            self._backend.n_samplers -= 1


def _prefix(adapters: Adapters) -> str:
    return "".join(f"<{id_}:{scale:g}>" for id_, scale in adapters)
