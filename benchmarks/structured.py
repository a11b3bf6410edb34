"""Output that follows a JSON Schema, beside the same number of tokens without one."""

from __future__ import annotations

import attrs

from benchmarks.load import Load
from benchmarks.plan import Plan
from benchmarks.scenarios import Settings
from benchmarks.stats import Metric, Sample
from benchmarks.targets import Target
from benchmarks.wire import Shape, answer_of, understand

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
#: Enough items that no output of a benchmark reaches the end: both runs have the same length.
SCHEMA = {"type": "array", "items": _ITEM, "minItems": 200, "maxItems": 200}


@attrs.frozen
class Structured:
    """Streams with a schema after the same streams without; the ratio is the cost of the schema.

    A first request compiles the schema; it is measured by itself.
    """

    settings: Settings
    clients: int = 8

    metrics = (
        Metric("schema / plain", "", more_is_better=True, digits=3),
        Metric("tokens/s", "", more_is_better=True),
        Metric("tokens/s plain", "", more_is_better=True),
        Metric("ttft p50", "ms"),
        Metric("itl p50", "ms", digits=2),
        Metric("first ttft", "ms"),
    )

    @property
    def name(self) -> str:
        """Such as "8 streams with a JSON Schema"."""
        return f"{self.clients} streams with a JSON Schema"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once. A server that refuses the field gives a sample without numbers, and a note."""
        plain = attrs.evolve(self.settings.shape, api="completion")
        # No `ignore_eos`: the schema does not let the output end, and the field would be a bias
        # on top of it.
        schema = attrs.evolve(plain, ignore_eos=False, more={"json_schema": SCHEMA})
        request = attrs.evolve(schema, max_tokens=4).request(self.settings.prompt(16, seed))
        outcome = self.settings.run(target, [Plan(requests=[request])]).outcomes[0]
        first = understand(outcome)
        if outcome.status in (400, 501):
            return Sample(numbers={}, notes=(f"not supported yet: {first.error}",))
        if first.error:
            return Sample(numbers={}, requests=1, failed=1, errors=(f"first: {first.error}",))
        text = answer_of(outcome)[0].lstrip()
        if text and text[0] != "[":
            return Sample(numbers={}, notes=(f"the schema was not followed: {text[:40]!r}",))
        without = self._load(plain).measure(target, f"{seed} plain")
        sample = self._load(schema).measure(target, f"{seed} schema")
        numbers = {**sample.numbers, "first ttft": first.ttft * 1e3}
        if "tokens/s" in without.numbers:
            numbers["tokens/s plain"] = without.numbers["tokens/s"]
        if "tokens/s" in numbers and "tokens/s plain" in numbers:
            numbers["schema / plain"] = numbers["tokens/s"] / numbers["tokens/s plain"]
        short = sample.numbers.get("tokens", 0) < without.numbers.get("tokens", 0)
        return attrs.evolve(
            sample,
            numbers=numbers,
            requests=sample.requests + without.requests + 1,
            failed=sample.failed + without.failed,
            errors=(*sample.errors, *without.errors),
            notes=(*sample.notes, *(["outputs with the schema were shorter"] if short else [])),
        )

    def _load(self, shape: Shape) -> Load:
        return Load(
            clients=self.clients,
            requests=self.settings.requests,
            shape=shape,
            timeout=self.settings.timeout,
            max_time=self.settings.max_time,
        )
