"""Compiler: compiles the grammars of requests for llguidance.

A grammar is compiled once, by whatever thread asks for it, and remembered. What llguidance cannot
enforce is refused: no output may look as if a grammar held where it did not. So is what takes too
much: a GBNF or a regular expression of more than 65,536 characters, a schema beyond the
bounds below, and what fails its `trial`.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any, NoReturn, TypeAlias, TypeVar

import attrs
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trioserve.chat.grammar.schemas import MAX_DEPTH, is_too_deep, moved, quoted
from trioserve.errors import EngineError, InvalidRequestError, OutputError
from trioserve.llama.grammar import gbnf, trial
from trioserve.llama.grammar.matcher import CompiledGrammar, MaskPool, brief
from trioserve.llama.grammar.tokens import GrammarVocab
from trioserve.llama.vocab import LlamaVocab
from trioserve.types import Grammar, TokenId

_MAX_TEXT = 2**18  # characters
_MAX_REQUIRED = 2500  # names in all lists of required properties; the time grows with their square
#: The time to compile grows with the square of this: 0.7 s for this many properties in an object.
#: Compiling recurses too, see `STACK`.
_MAX_SCHEMAS = 2500
_LOCATE_SECONDS = 0.25

#: Keywords of any draft that restrict values and that llguidance cannot enforce. It refuses those
#: of the schema's own draft and silently ignores those of others.
# fmt: off
_UNSUPPORTED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "disallow", "divisibleBy", "else", "extends", "if", "maxContains",
        "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
        "uniqueItems",
        "x-guidance",  # options of llguidance, which clients may not set
    }
)
# fmt: on
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties")


class _UnusableError(Exception):
    """The grammar cannot be used. The message is a part of a sentence.

    Args:
        problem: a description of the error.
        path: where, in a schema.
        param: which field of the request it is, if it is not that of the grammar.
    """

    def __init__(self, problem: str, path: str = "", param: str = "") -> None:
        super().__init__(f"{problem}, at {path}" if path else problem)
        self.param = param


def read_schema(text: str) -> Any:
    """Read the JSON of a schema, and check it: 262,144 characters, and nested 100 deep, at most.

    Raises:
        _UnusableError: it is not JSON, too large, or has an unsupported keyword.
    """
    if len(text) > _MAX_TEXT:
        raise _UnusableError(f"it has {len(text)} characters, more than {_MAX_TEXT}")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _UnusableError("it is nested too deeply") from None
    except ValueError as error:
        raise _UnusableError(f"it is not JSON: {error}") from None
    check_schema(schema)
    if schema is False:
        raise _UnusableError("nothing can follow it", "#")
    return {} if schema is True else schema


def check_schema(schema: Any) -> None:
    """Check the bounds of a schema, and that all its keywords can be enforced.

    Raises:
        _UnusableError: it is too large, or has an unsupported keyword; the message names the
            place.
    """
    if is_too_deep(schema):
        raise _UnusableError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(schema, dict | bool):
        raise _UnusableError("a schema is an object or a boolean", "#")
    n_required = 0
    for count, (path, part) in enumerate(_walk(schema)):
        if count == _MAX_SCHEMAS:
            raise _UnusableError(f"it has more than {_MAX_SCHEMAS} schemas in it")
        required = part.get("required") if isinstance(part, dict) else None
        n_required += len(required) if isinstance(required, list) else 0
        if n_required > _MAX_REQUIRED:
            raise _UnusableError(f"it requires more than {_MAX_REQUIRED} properties")
        for keyword in part if isinstance(part, dict) else ():
            if keyword in _UNSUPPORTED:
                place = f"{path}/{_escape(keyword)}"
                raise _UnusableError(f"the keyword '{keyword}' is not supported", place)


def locate(schema: Any, problem: str, ask: Callable[[Any], str]) -> str:
    """Find the smallest part of a schema that has a problem; gives up after a while.

    Args:
        schema: the whole.
        problem: the answer of `ask` for the whole schema.
        ask: describes the error in a schema; empty if there is none.

    Returns:
        A JSON pointer, of the whole schema if no smaller part was found.
    """
    until = monotonic() + _LOCATE_SECONDS
    whole = moved(schema, "#/$defs/_")
    path, part = "#", schema
    while True:
        for child_path, child in _children(path, part):
            if monotonic() > until:
                return path
            if ask({"$defs": {"_": whole}, "$ref": f"#/$defs/_{child_path[1:]}"}) == problem:
                path, part = child_path, child
                break
        else:
            return path


def _walk(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield a schema and all schemas in it, with their places."""
    waiting = [("#", schema)]
    while waiting:
        path, part = waiting.pop()
        yield path, part
        waiting += _children(path, part)


def _children(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for keyword in _MAPS:
        if isinstance(parts := schema.get(keyword), Mapping):
            for name, part in parts.items():
                yield f"{path}/{keyword}/{_escape(name)}", part
    for keyword in _LISTS:
        if isinstance(parts := schema.get(keyword), list):
            for i, part in enumerate(parts):
                yield f"{path}/{keyword}/{i}", part
    for keyword in _SINGLES:
        if isinstance(part := schema.get(keyword), dict | bool):
            yield f"{path}/{keyword}", part


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/&~#\-]")


def tools_to_lark(
    source: str, control: Mapping[str, TokenId], ends: frozenset[TokenId], options: Any
) -> str:
    """Write a grammar in Lark.

    Args:
        source: the parts of the grammar, as JSON.
        control: control tokens by name.
        ends: tokens that end an output at any point.
        options: llguidance's, for JSON.

    Raises:
        _UnusableError: a schema cannot be enforced.
    """
    parts = json.loads(source)
    for entry in parts["checks"]:
        _checked(entry)
    lines = [parts["rules"]]
    for name, text in parts["markers"].items():
        lines.append(f"{name}: {_marker(text, control, ends)}")
    for name, entry in parts["texts"].items():
        lines += _text(name, entry["body"], entry["end"], control, ends)
    for name, entry in parts["schemas"].items():
        schema = _checked(entry)
        lines.append(f"{name}: %json {json.dumps({**schema, 'x-guidance': options})}")
    return "\n".join([*lines, ""])


def blame(source: str, attempt: Callable[[Any], object]) -> None:
    """Raise for the schema that makes a grammar unusable, if a single one does.

    Args:
        source: the grammar.
        attempt: compiles a schema, or raises _UnusableError.

    Raises:
        _UnusableError: for that schema.
    """
    for entry in json.loads(source)["schemas"].values():
        try:
            attempt(_checked(entry))
        except _UnusableError as error:
            raise _UnusableError(str(error), param=entry["param"]) from None


def _checked(entry: Mapping[str, Any]) -> Any:
    try:
        return read_schema(json.dumps(entry["schema"]))
    except _UnusableError as error:
        raise _UnusableError(str(error), param=entry["param"]) from None


def _marker(text: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]) -> str:
    written = quoted(text)
    tokens = _tokens(text, control, ends)
    return written if tokens is None else f"{written} | {' '.join(tokens)}"


def _tokens(
    text: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]
) -> list[str] | None:
    """Write a text as text and control tokens; None if it has no name of a control token.

    A control token that ends the output ends the text too.
    """
    names = sorted((name for name in control if name in text), key=len, reverse=True)
    if not names:
        return None
    parts = []
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", text):
        if piece not in control:
            parts += [quoted(piece)] if piece else []
        elif control[piece] in ends:
            break
        else:
            parts.append(f"<[{control[piece]}]>")
    return parts or ['""']


def _text(
    name: str, body: str, end: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]
) -> list[str]:
    """Write text up to its end marker, as one lexeme because lexemes are greedy."""
    terminal = name.upper()
    # Blanks before the marker are a part of it, but the body may not hold it without them either.
    found = _pattern(end.strip() or end)
    lines = [f"{terminal}_BODY: {body} & ~/(?s:.*){found}(?s:.*)/"]
    lines.append(f"{terminal}: {terminal}_BODY {quoted(end)}")
    tokens = _tokens(end, control, ends)
    if tokens is None:
        return [*lines, f"{name}: {terminal}"]
    # What comes before the first token must be in the lexeme too, which would take it otherwise.
    n_before = 1 if tokens[0].startswith('"') else 0
    lines.append(f"{terminal}_ALONE: {' '.join([f'{terminal}_BODY', *tokens[:n_before]])}")
    rest = " ".join([f"{terminal}_ALONE", *tokens[n_before:]])
    return [*lines, f"{name}: {terminal} | {rest}"]


def _pattern(text: str) -> str:
    """Write a text as a regular expression."""
    escaped = _SPECIAL.sub(lambda found: f"\\{found[0]}", text)
    return escaped.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


_T = TypeVar("_T")
_Key: TypeAlias = tuple[str, Grammar]  # whose it is, and what

#: Bytes of stack for a thread that compiles. llguidance follows references by recursion: a chain of
#: 1,000 overruns 8 MiB. Only what is used is ever allocated.
STACK = 2**28 if sys.maxsize > 2**32 else 2**25
#: Bounds that keep one mask within a few milliseconds, and a grammar within some 50 MB.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,  # four for each of as many properties as a schema may have
    "initial_lexer_fuel": 250_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
#: llama-server's whitespace in JSON: a model that writes nothing but blanks comes to an end.
_JSON_OPTIONS: Any = {"lenient": False, "whitespace_pattern": r"[ ]|\n{1,2}[ \t]{0,20}"}
_MAX_SOURCE = 2**16  # characters of GBNF, or of a regular expression
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 2**27


class Compiler:
    """Compiles grammars for one vocabulary, and remembers the last ones.

    `compile` and `forget` may be called from any thread; `close` when no task uses a matcher.

    Args:
        vocab: of the model. llguidance's form of it is made with the first grammar, which takes a
            third of a second for 150,000 tokens.
        n_threads: how many masks can be made at the same time.
    """

    def __init__(self, vocab: LlamaVocab, *, n_threads: int = 1) -> None:
        self.pool = MaskPool(n_threads)
        self._tokens = GrammarVocab(vocab)
        self._vocab = vocab
        self._compiled: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._n_bytes = 0  # that they take, roughly
        self._compiling = threading.Lock()  # one grammar at a time
        self._lock = threading.Lock()  # of `_compiled`, held for an instant

    def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Compile a grammar, or find it among the last ones of its owner.

        Finding those of others would be quicker, and reveal what they have sent.

        Raises:
            InvalidRequestError: it is wrong, too large, or cannot be enforced.
            ServerClosingError: the model is closed.
        """
        key = owner, grammar
        if (known := self._find(key)) is not None:
            return known
        with self._vocab.in_use():
            return _with_stack(lambda: self._compile(key))

    def forget(self, owner: str, compiled: CompiledGrammar) -> None:
        """Compile the grammar again when it is needed."""
        key = owner, compiled.grammar
        with self._lock:
            if self._compiled.get(key) is compiled:
                del self._compiled[key]
                self._n_bytes -= _size_of(compiled.grammar)

    def close(self) -> None:
        """Wait for masks that are being made, and free everything. Closing twice is fine."""
        self.pool.close()
        with self._lock:
            self._compiled.clear()
            self._n_bytes = 0
        self._tokens.close()

    def _find(self, key: _Key) -> CompiledGrammar | None:
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
            return known

    def _compile(self, key: _Key) -> CompiledGrammar:
        _, grammar = key
        if not self._tokens.ends:
            raise _invalid(grammar, "the model has no token that ends an output")
        try:
            text = self._text(grammar)
            if trial.is_needed(grammar.kind, text):
                trial.run(text, _LIMITS)
            with self._compiling:
                return self._find(key) or self._compile_text(key, text)
        except _UnusableError as error:
            param = error.param or grammar.param
            raise _invalid(attrs.evolve(grammar, param=param), str(error)) from error
        except (gbnf.GbnfError, trial.TrialError) as error:
            raise _invalid(grammar, str(error)) from error
        except EngineError as error:
            problem = error.message.removeprefix("The grammar cannot be followed: ")
            raise _invalid(grammar, problem.rstrip(".")) from error

    def _text(self, grammar: Grammar) -> str:
        """Write a grammar of any kind as llguidance reads it."""
        source = grammar.source
        match grammar.kind:
            case "json_schema":
                return _schema_text(read_schema(source))
            case "json_object":
                return _schema_text({"type": "object"})
            case "tools":
                control, ends = self._tokens.control, self._tokens.ends
                return _lark_text(tools_to_lark(source, control, ends, _JSON_OPTIONS))
        if (size := len(source)) > _MAX_SOURCE:
            raise _UnusableError(f"it has {size} characters, more than {_MAX_SOURCE}")
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(source))
        return _lark_text(gbnf.to_lark(source, self._tokens.in_lark))

    def _compile_text(self, key: _Key, text: str) -> CompiledGrammar:
        owner, grammar = key
        tokenizer = self._tokens.tokenizer
        matcher = _new_matcher(text, tokenizer)
        if matcher.is_error():
            _explain(grammar, matcher.get_error(), tokenizer)
        compiled = CompiledGrammar(
            grammar, matcher, self._tokens, self.pool, partial(self.forget, owner)
        )
        if grammar.thinking is not None:
            self._tokens.names  # noqa: B018 (made now, not on the inference thread)
        with self._lock:
            self._compiled[key] = compiled
            self._n_bytes += _size_of(grammar)
            while self._n_bytes > _MAX_CACHED_BYTES or len(self._compiled) > _MAX_CACHED:
                (_, oldest), _ = self._compiled.popitem(last=False)
                self._n_bytes -= _size_of(oldest)
        return compiled


def _size_of(grammar: Grammar) -> int:
    """Estimate the memory of a compiled grammar: 0.2 to 5 MB were measured."""
    return 2 * 10**5 + 50 * len(grammar.source)


def _new_matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _schema_text(schema: Any) -> str:
    """Write a checked schema as llguidance reads it. Raises _UnusableError."""
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))
    except ValueError as error:  # numbers that JSON does not have
        raise _UnusableError(brief(str(error))) from error


def _lark_text(lark: str) -> str:
    return str(LLMatcher.grammar_from_lark(lark))


def _explain(grammar: Grammar, problem: str, tokenizer: LLTokenizer) -> NoReturn:
    """Raise for a grammar that llguidance refuses; the message names the place if it is a schema.

    Raises:
        _UnusableError: always.
    """

    def ask(schema: Any) -> str:
        return str(_new_matcher(_schema_text(schema), tokenizer).get_error())

    def attempt(schema: Any) -> None:
        if problem := ask(schema):
            raise _UnusableError(brief(problem), locate(schema, problem, ask))

    if grammar.kind == "tools":
        blame(grammar.source, attempt)
    elif grammar.kind == "json_schema":
        attempt(read_schema(grammar.source))
    raise _UnusableError(brief(problem))


def _invalid(grammar: Grammar, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{grammar.param}' cannot be used: {problem}.", param=grammar.param)


def _with_stack(function: Callable[[], _T]) -> _T:
    """Call a function in a thread with a large stack; returns or raises what it does."""
    results: list[_T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)
        except BaseException as error:  # a panic in Rust
            failures.append(OutputError("The grammar cannot be compiled."))
            failures[0].__cause__ = error

    thread = threading.Thread(target=work, name="trioserve-compile", daemon=True)
    size = threading.stack_size(STACK)
    try:
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
