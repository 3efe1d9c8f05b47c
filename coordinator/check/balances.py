"""What is judged about sums: invariant 5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .events import Change
from .evidence import Fact, lines
from .invariants import Findings
from .reading import HistoryError


class Balances:
    """What accounts held before and after, and what Confirms have changed: memory for accounts alone."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple[str, str], Fact]] = {"before": {}, "after": {}}
        self._changes: Counter[tuple[str, str]] = Counter()
        self._units: set[str] = set()
        """In which something was changed."""

    def add(self, fact: Fact) -> None:
        """An account's balance. Raises HistoryError if it was told before."""
        event = fact.event
        first = self._found[event.when].setdefault((event.unit, event.account), fact)
        if first is not fact:
            raise HistoryError(fact.line, f"its balance {event.when} stands in line {first.line} already", "account")

    def change(self, changes: Iterable[Change]) -> None:
        """What a Confirm has changed."""
        for change in changes:
            self._changes[change.unit, change.account] += change.amount
            self._units.add(change.unit)

    def judge(self, findings: Findings, *, all_changes: bool) -> None:
        """Judge them; ``all_changes``: every Confirm's effect is in the history."""
        before, after = self._found["before"], self._found["after"]
        for (unit, account), fact in after.items():
            findings.judged[5] += 1
            if fact.event.reserved:
                findings.add(5, f"account {account}", f"{fact.event.reserved} {unit} are reserved", lines(fact))
        for unit in sorted({unit for unit, _ in before} & {unit for unit, _ in after}):
            accounts = {account for kind, account in before if kind == unit}
            if accounts == {account for kind, account in after if kind == unit}:
                self._judge_unit(unit, sorted(accounts), findings)
                if all_changes and unit in self._units:
                    self._judge_accounts(unit, sorted(accounts), findings)

    def _judge_unit(self, unit: str, accounts: list[str], findings: Findings) -> None:
        findings.judged[5] += 1
        before, after = (
            sum(found[unit, account].event.amount + found[unit, account].event.reserved for account in accounts)
            for found in self._found.values()
        )
        if before != after:
            differ = [facts for account in accounts if _held(*(facts := self._both(unit, account)))]
            shown = [line for facts in differ[:2] for line in lines(*facts)]
            findings.add(5, f"unit {unit}", f"the sum was {before} and is {after}", shown)

    def _judge_accounts(self, unit: str, accounts: list[str], findings: Findings) -> None:
        for account in accounts:
            before, after = self._both(unit, account)
            must = before.event.amount + before.event.reserved + self._changes[unit, account]
            if after.event.amount + after.event.reserved != must:
                what = f"must hold {must} {unit} by what was confirmed, and holds {after.event.amount}"
                findings.add(5, f"account {account}", what, lines(before, after))

    def _both(self, unit: str, account: str) -> tuple[Fact, Fact]:
        return self._found["before"][unit, account], self._found["after"][unit, account]


def _held(before: Fact, after: Fact) -> bool:
    """Whether an account holds something else than before."""
    return bool(before.event.amount + before.event.reserved != after.event.amount + after.event.reserved)
