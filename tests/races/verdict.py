"""What must hold after every round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from participant_sdk.call import Outcome
from participant_sdk.fence import Phase, Status
from tests.races import faults
from tests.races.actor import Actor, shown
from tests.races.bank import Sight
from tests.races.handlers import AUTHORISE, TOLD_CANCEL, TOLD_TRY, Held, Provider
from tests.races.model import CANCEL_FAILED, CANCELLED_AGAIN, NEVER, RUNS, TAKEN_OVER, Branch, Seen, order_of
from tests.races.stories import BranchStory, Story


def violations(
    story: Story,
    calls: Sequence[Actor],
    times: Sequence[Seen],
    provider: Provider,
    opening: Sight,
    end: Sight,
    amount: int,
) -> list[str]:
    """What does not hold, in words; empty if all does. `times`: when leases have lapsed."""
    wrong = [text for actor in calls for text in _of_call(actor)]
    confirmed = dict.fromkeys(opening.accounts, 0)
    for branch_id, branch in enumerate(story.branches, 1):
        status, finished = end.rows.get(branch_id, (None, True))
        effects = tuple(end.effects.get(branch_id, ()))
        if status not in (Status.COMMITTED, Status.ROLLBACKED, Status.SUSPENDED):
            wrong.append(f"branch {branch_id} is not at an end: {status}")
        if not finished and status is not Status.SUSPENDED:
            wrong.append(f"branch {branch_id}: its row is not finished")
        mine = [actor for actor in calls if actor.call.branch_id == branch_id]
        history = [each for actor in mine for each in seen(actor, branch)]
        if order_of([*history, *times], Branch(status, effects=effects)) is None:
            wrong.append(f"branch {branch_id}: no order explains the answers, the status {status!r} and {effects}")
        if branch.external:
            wrong += _of_provider(branch_id, status, provider.told(calls[0].call.xid, branch_id), mine)
        if status is Status.COMMITTED:
            for account in branch.accounts:
                confirmed[account] += amount
    for account, was in opening.accounts.items():
        now = end.accounts[account]
        if (now.total, now.held, now.spent - was.spent) != (was.total, was.held, confirmed[account]):
            wrong.append(f"account {account} was {was} and is {now}, but {confirmed[account]} was confirmed")
    return wrong


def sight_violations(story: Story, opening: Sight, sight: Sight) -> list[str]:
    """What must hold of all that is committed, at every moment of the race. Of branches with outside effects: less."""
    wrong = []
    for branch_id, branch in enumerate(story.branches, 1):
        status, _ = sight.rows.get(branch_id, (None, True))
        effects = sorted(effect.partition(" ")[0] for effect in sight.effects.get(branch_id, ()))
        if not branch.external and effects not in EFFECTS[status]:
            wrong.append(f"branch {branch_id} was seen as {status!r} with {effects}")
    for account, was in opening.accounts.items():
        if sight.accounts[account].total != was.total:
            wrong.append(f"account {account} was {was} and was seen as {sight.accounts[account]}")
    return wrong


EFFECTS: Final[dict[Status | None, tuple[list[str], ...]]] = {
    None: ([],),
    Status.TRIED: (["try"],),
    Status.COMMITTED: (["confirm", "try"],),
    Status.ROLLBACKED: ([], ["cancel", "try"]),
    Status.SUSPENDED: ([],),
}


def _of_call(actor: Actor) -> Iterator[str]:
    if actor.crashed is not None:
        yield f"{actor.name} came out with {actor.crashed!r}"
    elif actor.reply is None and not actor.killed:
        yield f"{actor.name} has no answer"
    elif actor.reply is not None and actor.reply.outcome is Outcome.UNKNOWN and not _excused(actor):
        yield f"{actor.name}: nothing explains {shown(actor.reply)}; lost races: {actor.lost_races}"


def _of_provider(
    branch_id: int, status: Status | None, told: Sequence[tuple[str, str]], calls: Sequence[Actor]
) -> Iterator[str]:
    """What was done outside must have been undone, unless it is confirmed.

    Nobody can undo what a process did after Cancel, when its lease had lapsed, and which died before it could tell;
    where Cancel's handler itself has failed then, a person is told.
    """
    authorised = [number for number, (what, _) in enumerate(told) if what == TOLD_TRY]
    voided = [number for number, (what, _) in enumerate(told) if what == TOLD_CANCEL]
    if status is Status.COMMITTED:
        if not authorised:
            yield f"branch {branch_id} is confirmed, but the provider knows nothing of it"
    elif authorised and max(authorised) > max(voided, default=-1):
        excused = {
            actor.name for actor in calls if actor.killed or (actor.reply and CANCEL_FAILED in actor.reply.error)
        }
        if not (voided and told[max(authorised)][1] in excused):
            yield f"branch {branch_id} is {status!r}, but the provider was told {told} and holds it for ever"


def _excused(actor: Actor) -> bool:
    """A lost race or a lost connection is no excuse: there is time to run again.

    What an external Try that has not ended well may be answered, the model says; and where an earlier run of it may
    have had its effect, a refusal may not be final.
    """
    if actor.hit_by(faults.FAILING, faults.EXPIRED):
        return True
    if actor.reply is None or actor.call.action != AUTHORISE:
        return False
    return actor.hit_by(faults.REFUSING) or any(
        words in actor.reply.error for words in (RUNS, TAKEN_OVER, CANCELLED_AGAIN)
    )


def seen(actor: Actor, branch: BranchStory) -> list[Seen]:
    """The call as the model takes it; a run whose connection was lost counts as a call of its own that has died.

    It must have happened before the whole call is answered for good, if at all: the run after it settles that.
    """
    reply = actor.reply
    whole = Seen(
        name=actor.name,
        phase=actor.call.phase,
        invoked=actor.invoked or actor.number(),
        answered=NEVER if actor.answered is None or reply is None else actor.answered,
        outcome=None if reply is None else reply.outcome,
        run=reply.result.decode(Held).run if reply is not None and reply.result is not None else None,
        refusal=(reply.refusal.reason, reply.refusal.message) if reply is not None and reply.refusal else None,
        error="" if reply is None else reply.error,
        tried=tuple(actor.tried),
        refused=tuple(actor.refused),
        handled=actor.handled,
        lost=actor.hit_by(faults.LOST),
        external=branch.external,
        writes=branch.writes,
        died=NEVER if actor.died is None else actor.died,
        intents=max(1, actor.handled) + (actor.hit_by(faults.LOST, faults.KILLED) or actor.killed),
    )
    if branch.external and actor.call.phase is Phase.TRY:
        return [whole]
    settled = NEVER if whole.outcome in (None, Outcome.UNKNOWN) else whole.answered
    lost = replace(whole, name=f"a lost run of {actor.name}", answered=settled, outcome=None, died=NEVER)
    return [*(lost for fault in actor.struck if fault.kind == faults.LOST), whole]
