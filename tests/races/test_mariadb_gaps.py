"""InnoDB locks the gaps between rows: many calls for neighbouring keys at once must not see anything of that."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from participant_sdk.call import Outcome
from participant_sdk.fence import Phase, Status
from tests.races.actor import Actor
from tests.races.bank import LEVELS, Bank
from tests.races.faults import Traps
from tests.races.model import SUSPENDED_REASON
from tests.races.play import Round
from tests.races.stories import BranchStory, Story
from tests.races.watch import watched

CALLS = 60
STORY = Story(1, (BranchStory((), ()),), (), None, 0.0, 0.0)

pytestmark = pytest.mark.database
on_every_level = pytest.mark.parametrize("level", LEVELS["mariadb"])


def at_once(bank: Bank, phases: list[Phase]) -> list[tuple[Round, list[Actor]]]:
    """One transaction for each of CALLS // len(phases), and all of their calls at the same moment."""
    barrier = Barrier(CALLS)
    rounds = [Round(bank, STORY) for _ in range(CALLS // len(phases))]
    calls = [
        (each, [each.actor(phase.name, 1, phase, number % 2, Traps(()), 1) for number, phase in enumerate(phases)])
        for each in rounds
    ]

    def run(actor: Actor) -> None:
        barrier.wait()
        bank.run(actor)

    with ThreadPoolExecutor(CALLS) as threads:
        list(threads.map(run, [actor for _, actors in calls for actor in actors]))
    return calls


@on_every_level
def test_empty_rollbacks_of_different_transactions(level: str, url_of: Callable[[str], str]) -> None:
    with Bank("mariadb", level, url_of("mariadb"), connections=CALLS) as bank, watched():
        for _ in range(3):
            for each, (actor,) in at_once(bank, [Phase.CANCEL]):
                assert actor.reply is not None
                assert actor.reply.outcome is Outcome.DONE, actor.reply
                assert actor.lost_races == []  # designed away, not run again
                assert bank.look(each.xid).rows == {1: (Status.SUSPENDED, False)}


@on_every_level
def test_try_and_cancel_and_their_repeats(level: str, url_of: Callable[[str], str]) -> None:
    with Bank("mariadb", level, url_of("mariadb"), connections=CALLS) as bank, watched():
        for _ in range(3):
            for each, actors in at_once(bank, [Phase.TRY, Phase.CANCEL, Phase.TRY, Phase.CANCEL]):
                outcomes = [None if actor.reply is None else actor.reply.outcome for actor in actors]
                assert outcomes[1] is outcomes[3] is Outcome.DONE, outcomes
                assert {outcomes[0], outcomes[2]} <= {Outcome.DONE, Outcome.REFUSED}
                for actor in actors:
                    if actor.reply is not None and actor.reply.refusal is not None:
                        assert actor.reply.refusal.reason == SUSPENDED_REASON
                sight = bank.look(each.xid)
                tried = [effect.partition(" ")[0] for effect in sight.effects.get(1, ())]
                assert (sight.rows[1][0], tried) in ((Status.SUSPENDED, []), (Status.ROLLBACKED, ["try", "cancel"]))
