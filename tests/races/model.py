"""What the fence has to be like, said once more without a line of its code, and the search for an order.

Each call is taken to happen at one moment between its arrival and its answer (the Try of an external action: at two);
one that died may happen at any later moment, in part, or never. All answers, and what is in the database at the end,
must come of some order of these moments that the table of the design allows. If there is none, the fence has
contradicted itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from participant_sdk.call import Outcome
from participant_sdk.fence import Phase, Status

PHASES: Final = (Phase.TRY, Phase.CONFIRM, Phase.CANCEL)
"""What races: nothing is resolved by hand here."""
NEVER: Final = float("inf")
SUSPENDED_REASON: Final = "suspended"

VIOLATIONS: Final = {
    (Phase.CONFIRM, None): "never tried here",
    (Phase.CONFIRM, Status.ROLLBACKED): "was cancelled or refused",
    (Phase.CONFIRM, Status.SUSPENDED): "was cancelled before it was tried",
    (Phase.CANCEL, Status.COMMITTED): "was confirmed",
}
"""Where a call contradicts what is stored, and words of what it is told."""

ALREADY: Final = {
    (Phase.CONFIRM, Status.COMMITTED),
    (Phase.CANCEL, Status.ROLLBACKED),
    (Phase.CANCEL, Status.SUSPENDED),
}
"""Where a call is done already."""

RUNS: Final = "may still be running"
NOT_ENDED: Final = "has not ended well"
TAKEN_OVER: Final = "taken over"
CANCEL_FAILED: Final = "Cancel's handler has failed"
CANCELLED_AGAIN: Final = "Cancel's handler has run again"


class Branch(NamedTuple):
    """What is stored about a branch. `run`: which run of Try's handler counts.

    `intent`: whose external Try has not ended; then `leased` tells whether it may still be running.
    """

    status: Status | None = None
    run: str | None = None
    refusal: str | None = None
    effects: tuple[str, ...] = ()
    intent: str | None = None
    leased: bool = False


@dataclass(frozen=True)
class Seen:
    """A call as its caller saw it, or a run of one that nobody saw the end of: `outcome` is None then.

    That one may have happened, or not: by `answered` at the latest, or NEVER. `phase` None: leases have lapsed.
    `tried` and `refused`: the runs of Try's handler that ended so. `handled`: how often a handler was called.
    `lost`: it has lost a connection, and does not know itself what it did before. `died`: when, if nothing was on its
    way by then; who has met the row since, has met what the dead one left. `intents`: how many it can have stored.
    """

    name: str
    phase: Phase | None
    invoked: float
    answered: float
    outcome: Outcome | None
    run: str | None = None
    refusal: tuple[str, str] | None = None
    error: str = ""
    tried: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    handled: int = 0
    lost: bool = False
    external: bool = False
    writes: bool = True
    died: float = NEVER
    intents: int = 1

    @property
    def meets(self) -> bool:
        """Whether it has surely waited for whoever had the row before it. Confirm may read without waiting."""
        return self.phase in (Phase.TRY, Phase.CANCEL) and (
            self.outcome not in (None, Outcome.UNKNOWN) or RUNS in self.error
        )

    def may_end(self, outcome: Outcome, *, run: str | None = None, words: str = "") -> bool:
        """Whether this answer is one that it may have got."""
        return self.outcome is None or (self.outcome is outcome and self.run == run and words in self.error)


END: Final = -1
EFFECTS_MAX: Final = 6
Moves = Iterator[tuple[int, Branch]]


def moves(seen: Seen, place: int, branch: Branch) -> Moves:
    """What can happen next in a call that stands at `place` (0: at its beginning), and where it stands after it."""
    if seen.phase is None:
        yield END, branch._replace(leased=False)
    elif seen.external and (branch.status is None or branch.intent is not None or place % 2):
        yield from _external_moves(seen, place, branch)
    else:
        for following in after(seen, branch):
            yield END, following


def after(seen: Seen, branch: Branch) -> Iterator[Branch]:
    """What a branch can be like after the call has happened to it, so that the call's answer was right."""
    assert seen.phase is not None
    cell = (seen.phase, branch.status)
    if seen.outcome is Outcome.UNKNOWN:  # all of it was rolled back
        if RUNS not in seen.error and CANCELLED_AGAIN not in seen.error:
            yield branch
    elif cell in VIOLATIONS:
        if seen.may_end(Outcome.VIOLATION, words=VIOLATIONS[cell]):
            yield branch
    elif cell in ALREADY:
        if seen.may_end(Outcome.DONE):
            yield branch
    elif seen.phase is Phase.TRY:
        yield from _after_try(seen, branch)
    elif cell == (Phase.CANCEL, None):
        if seen.may_end(Outcome.DONE):
            yield branch._replace(status=Status.SUSPENDED)
    elif seen.handled and seen.may_end(Outcome.DONE):
        status = Status.COMMITTED if seen.phase is Phase.CONFIRM else Status.ROLLBACKED
        yield _with(branch, f"{seen.phase.name.lower()} {branch.run}", status=status)


def _after_try(seen: Seen, branch: Branch) -> Iterator[Branch]:
    if branch.status is None:
        yield from _tried(seen, branch)
    elif branch.status in (Status.TRIED, Status.COMMITTED):
        if seen.may_end(Outcome.DONE, run=branch.run):
            yield branch
    elif _is_told(seen, branch.refusal):
        yield branch


def _tried(seen: Seen, branch: Branch, told: bool = True) -> Iterator[Branch]:
    """A run of Try's handler has ended. `told`: it is this that is answered."""
    for run in seen.tried:
        if not told or seen.may_end(Outcome.DONE, run=run):
            yield _with(branch, *([f"try {run}"] if seen.writes else []), status=Status.TRIED, run=run)
    for run in seen.refused:
        if not told or _is_told(seen, run):
            yield _with(branch, status=Status.ROLLBACKED, refusal=run)


def _with(branch: Branch, *effects: str, status: Status, run: str | None = None, refusal: str | None = None) -> Branch:
    return Branch(status, run or branch.run, refusal, (*branch.effects, *effects))


def _is_told(seen: Seen, refusal: str | None) -> bool:
    """Whether it may have been refused so: `refusal` names the handler's run that said no; None: as suspended."""
    if seen.outcome is None:
        return True
    if seen.outcome is not Outcome.REFUSED or seen.refusal is None:
        return False
    reason, message = seen.refusal
    return reason == SUSPENDED_REASON if refusal is None else message == refusal


def _external_moves(seen: Seen, place: int, branch: Branch) -> Moves:
    """Where a Try has not ended, or is about to begin. At odd places a Try holds an intent, at even ones none."""
    if place % 2:
        yield from _end_of_try(seen, place, branch)
        return
    if seen.may_end(Outcome.UNKNOWN) and RUNS not in seen.error:
        yield END, branch
    if branch.leased and seen.phase is not Phase.CONFIRM:
        if seen.may_end(Outcome.UNKNOWN, words=RUNS):
            yield END, branch
    elif seen.phase is Phase.TRY:
        if place // 2 < seen.intents:
            yield place + 1, branch._replace(status=Status.TRIED, intent=f"{seen.name} {place}", leased=True)
    elif branch.status is None:
        for following in after(seen, branch):
            yield END, following
    elif seen.phase is Phase.CONFIRM:
        if seen.may_end(Outcome.VIOLATION, words=NOT_ENDED):
            yield END, branch
    elif seen.handled and seen.may_end(Outcome.DONE):
        yield END, _with(branch, "cancel None", status=Status.ROLLBACKED)


def _end_of_try(seen: Seen, place: int, branch: Branch) -> Moves:
    if branch.intent != f"{seen.name} {place - 1}":  # Cancel, or another Try, has been faster
        cancelled = branch.status is Status.ROLLBACKED and branch.intent is None
        if cancelled:
            again = _with(branch, "cancel None", status=Status.ROLLBACKED, refusal=branch.refusal)
            if seen.may_end(Outcome.UNKNOWN, words=CANCELLED_AGAIN):
                yield END, again
            if seen.lost and len(branch.effects) < EFFECTS_MAX:  # it was not told so, and does it once more
                yield place, again
        never = (RUNS, CANCELLED_AGAIN, TAKEN_OVER) if cancelled else (RUNS, CANCELLED_AGAIN)
        if seen.may_end(Outcome.UNKNOWN) and not any(words in seen.error for words in never):
            yield END, branch
        yield place + 1, branch
        return
    for following in _tried(seen, branch):
        yield END, following
    for leased in (False, True):  # it has failed; then its lease is ended, unless that fails, too
        if leased and not seen.lost:
            break
        yield place + 1, branch._replace(leased=leased)
        if seen.may_end(Outcome.UNKNOWN) and RUNS not in seen.error:
            yield END, branch._replace(leased=leased)
    if seen.lost:  # it may have happened without being told so, and go on as if it had not
        if branch.leased:
            yield place, branch._replace(leased=False)
        for following in _tried(seen, branch, told=False):
            yield place + 1, following
            yield place, following


def order_of(history: Sequence[Seen], end: Branch) -> list[str] | None:
    """An order in which everything that was seen can have happened; None if there is none.

    `end` is what the database holds when all is over: its status and its effects.
    """
    calls = sorted(history, key=lambda seen: seen.invoked)
    wanted = (end.status, tuple(sorted(end.effects)))
    hopeless: set[tuple[frozenset[tuple[int, int]], Branch, float]] = set()

    def search(left: frozenset[tuple[int, int]], branch: Branch, met: float, order: list[str]) -> list[str] | None:
        """`met`: when the latest of those that have surely met the row has begun."""
        if all(calls[number].outcome is None for number, _ in left) and wanted == (
            branch.status,
            tuple(sorted(branch.effects)),
        ):
            return order
        if (left, branch, met) in hopeless:
            return None
        first_answer = min((calls[number].answered for number, _ in left if calls[number].outcome), default=NEVER)
        for number, place in sorted(left):
            call = calls[number]
            if call.invoked > first_answer:
                break
            if call.died < met:
                continue
            others = frozenset(
                other for other in left if other[0] != number and calls[other[0]].answered >= call.invoked
            )
            now_met = max(met, call.invoked) if call.meets else met
            for reached, following in moves(call, place, branch):
                now_left = others if reached == END else others | {(number, reached)}
                found = search(now_left, following, now_met, [*order, call.name])
                if found is not None:
                    return found
        hopeless.add((left, branch, met))
        return None

    return search(frozenset((number, 0) for number in range(len(calls))), Branch(), 0, [])
