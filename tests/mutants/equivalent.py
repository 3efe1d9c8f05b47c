"""Mutants with which no test can fail, each with the proof."""

from __future__ import annotations

from typing import Final, NamedTuple

from .operators import Mutant, plain


class Equivalent(NamedTuple):
    """One change of text that changes nothing that anybody can see."""

    module: str
    where: str
    """The function; empty: the module itself."""
    old: str
    new: str
    proof: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """As a mutant's."""
        return self.module, self.where, plain(self.old), plain(self.new)


MACHINE: Final = "coordinator.machine"
FENCE: Final = "participant_sdk.fence"

EVENT_NUMBERS: Final = (
    "An Event is a key, is compared by identity and told by its name: its number is never stored, nor tested."
)
JOINED: Final = "joined = tx.joined_as(branch) if tx.joined else None"
KEPT: Final = "return tx.wake_ms if tx.wake_ms is not None and enough_ms <= tx.wake_ms <= end_ms else end_ms"
CLEARED: Final = "_PLAIN.clear()"
CHECKED: Final = "if reply.phase is Phase.TRY or not step.fence_id or reply.fence_id == step.fence_id: return reply"
NO_FENCE_YET: Final = (
    "A Try is waited for while its branch is PENDING in TRYING, and then the step has no fence_id: only the answer that"
    " ends its Try gives it one, or a late answer after the decision to cancel."
)
UNRESOLVED: Final = "statuses = [s for n, s in enumerate(statuses) if tx.resolution_of(n) is None or s not in _ENDS]"

EQUIVALENT: Final[tuple[Equivalent, ...]] = (
    Equivalent(MACHINE, "Event", "ALL_TRIED = 1", "ALL_TRIED = 0", EVENT_NUMBERS),
    Equivalent(MACHINE, "Event", "OPERATOR = 8", "OPERATOR = 9", EVENT_NUMBERS),
    Equivalent(
        MACHINE,
        "called",
        JOINED,
        "joined = tx.joined_as(branch) if True else None",
        "Where nothing has joined, all branches are `begun`, so the index is negative and joined_as gives None too.",
    ),
    Equivalent(
        MACHINE,
        "wanted",
        "if tx.resolved and (resolution := tx.resolution_of(branch)) is not None: ...",
        "if (resolution := tx.resolution_of(branch)) is not None: ...",
        "Where nothing was resolved, resolution_of finds nothing in an empty tuple and gives None: only slower.",
    ),
    Equivalent(
        MACHINE,
        "apply",
        "if reply.seen and steps[reply.branch].status is BranchStatus.TRIED:\n"
        "    seen += (Seen(reply.branch + 1, branch_id) for branch_id in reply.seen)",
        "if steps[reply.branch].status is BranchStatus.TRIED:\n"
        "    seen += (Seen(reply.branch + 1, branch_id) for branch_id in reply.seen)",
        "Where reply.seen is empty, so is what is added: nothing.",
    ),
    Equivalent(
        MACHINE,
        "apply",
        "if seen:\n    tx = tx._replace(seen=tx.seen + tuple(seen))",
        "if True:\n    tx = tx._replace(seen=tx.seen + tuple(seen))",
        "`moved` is set before; with nothing seen the new `tx` equals the old one, and is only read from here on.",
    ),
    Equivalent(
        MACHINE,
        "apply",
        "if seen or failures or after != tx.steps or (attention is not tx.attention):\n"
        "    moved = tx._replace(steps=after, attention=attention, updated_ms=now_ms)",
        "if failures or after != tx.steps or attention is not tx.attention:\n"
        "    moved = tx._replace(steps=after, attention=attention, updated_ms=now_ms)",
        "Something is seen only in an answer that was wanted, of a branch that is TRIED by it and was not before: "
        "its Step is another.",
    ),
    Equivalent(
        MACHINE,
        "wake_at",
        KEPT,
        KEPT.replace("<= end_ms", "< end_ms"),
        "They differ where wake_ms is end_ms, and there one gives wake_ms and the other end_ms: the same number.",
    ),
    Equivalent(
        MACHINE,
        "backoff_ms",
        "stirred = (stirred ^ stirred >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF",
        "stirred = (stirred ^ stirred >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFE",
        "Only `stirred >> 32` is used from here on: the last bit is thrown away either way.",
    ),
    *(
        Equivalent(
            MACHINE,
            "_plain",
            f"if len(_PLAIN) > 10000:\n    {CLEARED}",
            f"if len(_PLAIN) {bound}:\n    {CLEARED}",
            "A step that is found and one that is made are equal, so no transaction tells how many are kept: it bounds "
            "the memory, in which one of ten thousand more or less is nothing.",
        )
        for bound in (">= 10000", "> 10001", "> 9999")
    ),
    Equivalent(
        MACHINE,
        "_answered",
        "fence_id = step.fence_id or reply.fence_id",
        "fence_id = reply.fence_id",
        NO_FENCE_YET + " And _checked lets no other phase be DONE unless both are equal, where the step has one.",
    ),
    Equivalent(MACHINE, "_checked", CHECKED, CHECKED.replace("reply.phase is Phase.TRY or ", ""), NO_FENCE_YET),
    Equivalent(
        MACHINE,
        "_fails_late",
        "return not known and state is State.CANCELLING and (step.status is BranchStatus.PENDING)",
        "return not known and step.status is BranchStatus.PENDING",
        "It is asked of answers that are not waited for. A PENDING branch is one of TRYING, which waits for its Try, "
        "or of CANCELLING: ALL_TRIED needs all of them TRIED, and no transaction ends before all its branches have.",
    ),
    Equivalent(
        MACHINE, "_contradicts", "return False", "return None", "It is only ever asked in an if, where both are a no."
    ),
    Equivalent(
        MACHINE,
        "_event",
        "if tx.joined and _not_named(tx): return Event.NOT_NAMED",
        "if _not_named(tx): return Event.NOT_NAMED",
        "Where nothing has joined, all branches are `begun`, so there are none after them that could be left unnamed.",
    ),
    Equivalent(
        MACHINE,
        "_event",
        f"if tx.resolved:\n    {UNRESOLVED}",
        f"if True:\n    {UNRESOLVED}",
        "Where nothing was resolved, resolution_of is None for every branch, and all statuses are kept.",
    ),
    Equivalent(
        MACHINE,
        "_event",
        UNRESOLVED,
        UNRESOLVED.replace("tx.resolution_of(n) is None or ", ""),
        "More is left out: branches that have ended and were never resolved. Those have ended as was decided, since "
        "only a Settle ends one otherwise; so each of them meets the condition that `all` asks for.",
    ),
    Equivalent(
        MACHINE,
        "_not_named",
        "return []",
        "return None",
        "It is asked in an if, where both are a no, and in the reason of the move that a yes has brought about.",
    ),
    Equivalent(
        MACHINE,
        "_not_named",
        "return [n for n in range(tx.begun + 1, len(tx.steps) + 1) if n not in found]",
        "return [n for n in range(tx.begun + 0, len(tx.steps) + 1) if n not in found]",
        "It adds the last branch that was begun, or 0 where none was: `found` holds every begun one, and of a "
        "transaction without any, interactive as it is, nothing is asked here.",
    ),
    Equivalent(
        MACHINE,
        "_cancel_reason",
        "if event is not Event.REFUSED: return ''",
        "if False: return ''",
        "The loop that follows looks for a REFUSED branch. Whatever moves a transaction otherwise finds none: _event "
        "gives REFUSED before all else, so that none is TRYING any more once apply has returned.",
    ),
)


def unmatched(made: list[Mutant]) -> list[Equivalent]:
    """Entries that speak of no mutant: the source has changed under them."""
    keys = {mutant.key for mutant in made}
    return [entry for entry in EQUIVALENT if entry.key not in keys]
