"""Measures the enforced part of JSON Schema, and its cost, in the manner of JSONSchemaBench.

    python -m tests.support.schema_set --model MODEL [--count 300] [--write FILE]

The schemas are drawn by Hypothesis, always the same for a count. Each that the server accepts is
followed by outputs of random tokens, as no model would choose them: all that the grammar allows
must be valid JSON that follows the schema. The table has the share of schemas that are accepted,
why the others are not, and the microseconds of the CPU that a mask takes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.strategies import SearchStrategy

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import TrioServeError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.matcher import CompiledGrammar
from trioserve.types import Grammar

#: Outputs of each schema, and the most tokens of one.
N_OUTPUTS = 3
MAX_TOKENS = 3000

KINDS = ("string", "integer", "number", "boolean", "null")
PATTERNS = ("^[a-z]{2,8}$", r"^\d{3}-\d{4}$", "^(foo|bar)", "x$", "^[^@]+@ab$")
FORMATS = ("date", "date-time", "time", "ipv4", "ipv6", "email", "uuid", "uri")
NAMES = ("id", "name", "tags", "$type", "createdAt", "a b", "größe", "url", "meta")

_Schema = dict[str, Any]


def leaves(kind: str) -> SearchStrategy[_Schema]:
    """Draw the keywords of a schema without others in it."""
    short, bound = st.integers(0, 4), st.integers(-1000, 1000)
    texts = st.text(max_size=6)
    optional: Mapping[str, Mapping[str, SearchStrategy[Any]]] = {
        "string": {
            "minLength": short,
            "maxLength": st.integers(5, 30),
            "pattern": st.sampled_from(PATTERNS),
            "format": st.sampled_from(FORMATS),
            "enum": st.lists(texts, min_size=1, max_size=4, unique=True),
            "description": texts,
        },
        "integer": {
            "minimum": bound,
            "exclusiveMaximum": st.integers(1001, 99999),
            "multipleOf": st.sampled_from([2, 5, 10]),
        },
        "number": {"minimum": bound, "maximum": st.integers(1001, 10**6)},
        "boolean": {"default": st.booleans()},
        "null": {},
    }
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=optional[kind])


@st.composite
def inner(draw: st.DrawFn, depth: int) -> _Schema:
    """Draw a schema with others in it, at most this deep."""
    kind = draw(st.sampled_from([*KINDS, "object", "object", "array", "combined", "const"]))
    if kind in KINDS or depth == 0:
        return draw(leaves(kind if kind in KINDS else "string"))
    child = inner(depth - 1)
    match kind:
        case "object":
            return draw(objects(child))
        case "array":
            optional: Mapping[str, SearchStrategy[Any]] = {
                "minItems": st.integers(0, 4),
                "maxItems": st.integers(5, 30),
                "uniqueItems": st.just(True),
            }
            array = {"type": st.just("array"), "items": child}
            return draw(st.fixed_dictionaries(array, optional=optional))
        case "const":
            return {"const": draw(st.one_of(st.text(max_size=6), st.integers(), st.none()))}
    word = draw(st.sampled_from(["anyOf", "anyOf", "oneOf", "allOf"]))
    return {word: draw(st.lists(child, min_size=1, max_size=3))}


@st.composite
def objects(draw: st.DrawFn, child: SearchStrategy[_Schema]) -> _Schema:
    """Draw a schema of objects."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    made: _Schema = {"type": "object", "properties": {name: draw(child) for name in names}}
    if draw(st.booleans()):
        made["required"] = draw(st.lists(st.sampled_from(names), unique=True))
    match draw(st.sampled_from(["", "closed", "closed", "open", "schema", "pattern", "count"])):
        case "closed" | "open" as extra:
            made["additionalProperties"] = extra == "open"
        case "schema":
            made["additionalProperties"] = draw(child)
        case "pattern":
            made["patternProperties"] = {"^x-": draw(child)}
        case "count":
            made["minProperties"] = draw(st.integers(1, len(names)))
    return made


def drawn(count: int) -> list[_Schema]:
    """Draw schemas, always the same ones."""
    found: list[_Schema] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(objects(inner(2)))
    def collect(schema: _Schema) -> None:
        found.append(schema)

    collect()
    return found


@attrs.define
class Report:
    """The results of the schemas."""

    n_schemas: int = 0
    n_outputs: int = 0
    n_unfinished: int = 0  # outputs of `MAX_TOKENS`
    refused: Counter[str] = attrs.field(factory=Counter)
    invalid: list[str] = attrs.field(factory=list)
    compile_ms: list[float] = attrs.field(factory=list)
    mask_us: list[float] = attrs.field(factory=list)

    @property
    def n_accepted(self) -> int:
        """Schemas that the server enforces."""
        return self.n_schemas - sum(self.refused.values())

    def lines(self) -> list[str]:
        """Write the table."""
        n, masks = max(1, self.n_schemas), sorted(self.mask_us)
        finished = self.n_outputs - self.n_unfinished

        def at(share: float) -> float:
            return masks[min(len(masks) - 1, int(share * len(masks)))]

        rows = [
            ("schemas", f"{self.n_schemas}"),
            ("accepted", f"{self.n_accepted} ({self.n_accepted / n:.1%})"),
            ("outputs that ended", f"{finished} of {self.n_outputs}"),
            ("valid", f"{finished - len(self.invalid)} ({1 - len(self.invalid) / finished:.1%})"),
            ("compile, ms, p50", f"{statistics.median(self.compile_ms):.1f}"),
            ("masks", f"{len(masks)}"),
            ("mask, µs, mean", f"{statistics.fmean(masks):.0f}"),
            ("mask, µs, p50 / p99", f"{at(0.5):.0f} / {at(0.99):.0f}"),
            *(("refused: " + why, f"{n}") for why, n in self.refused.most_common()),
        ]
        return ["| | |", "|---|--:|", *(f"| {name} | {value} |" for name, value in rows)]


def examine(
    backend: LlamaBackend,
    schemas: Sequence[_Schema],
    seed: int = 0,
    n_outputs: int = N_OUTPUTS,
    max_tokens: int = MAX_TOKENS,
) -> Report:
    """Compile schemas, and follow each with outputs of random tokens."""
    report, walker = Report(n_schemas=len(schemas)), _Walker(backend, seed, max_tokens)
    report.mask_us = walker.mask_us
    for schema in schemas:
        began = time.perf_counter()
        try:
            compiled = backend.compile(Grammar("json_schema", json.dumps(schema)))
        except TrioServeError as error:
            report.refused[_reason(error.message)] += 1
            continue
        report.compile_ms.append((time.perf_counter() - began) * 1e3)
        checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        validator = checker(schema, format_checker=jsonschema.FormatChecker())
        for _ in range(n_outputs):
            report.n_outputs += 1
            output = walker.walk(compiled)
            if output is None:
                report.n_unfinished += 1
            elif problem := _problem(output, validator):
                report.invalid.append(f"{json.dumps(schema)}\n  {output!r}\n  {problem}")
    return report


def _reason(message: str) -> str:
    """Leave out what differs from schema to schema."""
    text = message.partition(": ")[2].partition(", at ")[0]
    return re.sub(r"\d{2,}|\"[^\"]*\"", "…", text)[:80].rstrip(".")


class _Walker:
    """Follows grammars with random tokens, and rather with those that lead to the end."""

    def __init__(self, backend: LlamaBackend, seed: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._pieces = backend.vocab.pieces
        self._chance = random.Random(seed)
        self._is_end = np.zeros(len(self._pieces), dtype=np.bool_)
        self._is_end[sorted(backend.vocab.end_of_generation)] = True
        closing = (piece.strip()[:1] in (b'"', b"}", b"]") for piece in self._pieces)
        self._is_closing = np.fromiter(closing, dtype=np.bool_)
        self.mask_us: list[float] = []

    def walk(self, compiled: CompiledGrammar) -> bytes | None:
        """Make an output; None: it did not come to an end."""
        matcher, mask, chance = compiled.matcher(), compiled.first, self._chance
        output: list[bytes] = []
        for n in range(self._max_tokens):
            ids = mask.ids
            others = ids[~self._is_end[ids]]
            if len(others) < len(ids) and (chance.random() < 0.3 or not len(others)):
                return b"".join(output)
            closing = others[self._is_closing[others]]
            if len(closing) and chance.random() < min(0.9, 0.3 + n / 500):
                others = closing
            token = int(others[chance.randrange(len(others))])
            output.append(self._pieces[token])
            began = time.thread_time()
            mask = matcher.advance(token)
            self.mask_us.append((time.thread_time() - began) * 1e6)
        return None


def _problem(output: bytes, validator: Any) -> str:
    """Say what is wrong with an output; empty if nothing is."""
    try:
        value = json.loads(output.decode())
    except ValueError as error:
        return f"no JSON: {error}"
    found = jsonschema.exceptions.best_match(validator.iter_errors(value))
    return "" if found is None else found.message


def main() -> None:
    """Print the table, and the outputs that are not valid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a GGUF file; by default the bundled model")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--write", type=Path, help="write the schemas into a file, too")
    options = parser.parse_args()
    schemas = drawn(options.count)
    if options.write is not None:
        options.write.write_text("".join(f"{json.dumps(one)}\n" for one in schemas))
    model = {} if options.model is None else {"model": options.model}
    backend = llama.load(Config(ctx_size=256, parallel=1, threads=1, **model))
    assert isinstance(backend, LlamaBackend)
    with backend:
        report = examine(backend, schemas)
    print("\n".join([*report.lines(), *report.invalid]))


if __name__ == "__main__":
    main()
