"""A vocabulary with a token for each byte, and a constraint that checks an output in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from trioserve.engine.reasoning import TriggerScanner
from trioserve.errors import InvalidRequestError, OutputError
from trioserve.types import Constraint, FimTokens, Grammar, TokenId

#: The id of the end-of-generation token; ids below are bytes.
EOS = 256


class ByteVocab:
    """One token a byte, and one that ends the output."""

    n_tokens = 257
    max_token_bytes = 5
    pieces: Sequence[bytes] = (*(bytes([i]) for i in range(256)), b"")
    names: Sequence[bytes] = (*pieces[:256], b"<eos>")
    control: Sequence[TokenId] = (EOS,)
    end_of_generation = frozenset({EOS})
    bos = -1
    fim = FimTokens()

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = False,
        parse_special: bool = True,
        is_fragment: bool = False,
        check: Callable[[int], object] = lambda _n: None,
    ) -> tuple[TokenId, ...]:
        return tuple(text.encode())

    def detokenize(self, tokens: Sequence[TokenId]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)


byte_vocab = ByteVocab()


class ScriptedConstraint(Constraint):
    """Checks a complete output. For a JSON Schema it checks only that the output is JSON.

    Grammars for tool calls are not checked.
    """

    def __init__(self, grammar: Grammar) -> None:
        super().__init__(grammar)
        if grammar.kind in ("gbnf", "lark", "structural"):
            message = f"A script knows no grammar of the kind {grammar.kind!r}."
            raise InvalidRequestError(message, param=grammar.param)
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
        if self.grammar.kind == "tools":  # not checked
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
