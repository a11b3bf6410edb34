"""Counts of answers, and the faults among them."""

from __future__ import annotations

from collections import Counter, defaultdict

import attrs

#: Sentences about faults that are kept; the others are counted.
MAX_FAULTS = 50


@attrs.frozen
class Check:
    """Something that has to be after the load as it was before, or as it always has to be."""

    name: str
    before: object
    after: object
    is_good: bool


@attrs.define
class Tally:
    """Counts of what was sent and what came back, by kind of request, and the faults seen."""

    outcomes: defaultdict[str, Counter[str]] = attrs.field(factory=lambda: defaultdict(Counter))
    faults: Counter[str] = attrs.field(factory=Counter)
    #: The subjects of the verdict, before the load and after it.
    checks: list[Check] = attrs.field(factory=list)

    @property
    def n_requests(self) -> int:
        """The number of requests that were sent, or begun."""
        return sum(outcomes.total() for outcomes in self.outcomes.values())

    def note(self, name: str, outcome: object) -> None:
        """Count a request."""
        self.outcomes[name][str(outcome)] += 1

    def fault(self, sentence: str) -> None:
        """Note something that is wrong."""
        if sentence in self.faults or len(self.faults) < MAX_FAULTS:
            self.faults[sentence] += 1
        else:
            self.faults["more faults, which are not listed"] += 1

    def check(self, check: Check) -> None:
        """Put a line into the verdict."""
        self.checks.append(check)
        if not check.is_good:
            self.fault(f"{check.name}: {check.after}, and {check.before} before the load")

    def verdict(self) -> str:
        """Write the verdict, a line for each check."""
        rows = [("", "before", "after", "")]
        rows += [(one.name, str(one.before), str(one.after), "good" if one.is_good else "WRONG")
                 for one in self.checks]  # fmt: skip
        rows.append(("faults", "", str(self.faults.total()), "WRONG" if self.faults else "good"))
        widths = [max(len(row[at]) for row in rows) for at in range(3)]
        return "\n".join(
            f"{name:{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  {word}".rstrip()
            for name, before, after, word in rows
        )

    def sentences(self) -> list[str]:
        """Say what is wrong."""
        return [f"{n} times: {fault}" if n > 1 else fault for fault, n in self.faults.items()]

    def table(self) -> str:
        """Write what was sent and what came back, a line for each kind."""
        width = max(map(len, self.outcomes), default=0)
        return "\n".join(
            f"{name:{width}}  {outcomes.total():6}  "
            + ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
            for name, outcomes in sorted(self.outcomes.items())
        )
