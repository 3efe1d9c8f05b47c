"""Branches that wait for an action that this program does not have, as after a deploy that renamed a handler.

Their Confirm or Cancel is answered "unknown" until an instance that has the action gets it; never does another
handler get it instead. It is told at the start, when whoever deployed still looks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from participant_sdk.errors import describe
from participant_sdk.fence import Status
from participant_sdk.fence_tables import FenceTables

logger = logging.getLogger("tricord.participant")

ROWS_MAX: Final = 100_000
"""So many of the newest rows are looked at, by the primary key: a start must not wait for a large table. What has
waited for longer is the resolver's, which tells of it, too."""


def tell(connection: Connection, tables: FenceTables, participant: str, actions: Collection[str]) -> None:
    """One warning for each action that is not among `actions`, with how many branches have been tried with it.

    It is only told: if the database does not answer in time, the start goes on.
    """
    log = tables.log
    newest = (
        select(log.c.participant, log.c.action, log.c.status)
        .order_by(log.c.xid.desc(), log.c.branch_id.desc())
        .limit(ROWS_MAX)
        .subquery()
    )
    waiting = (
        select(newest.c.action, func.count())
        .where(newest.c.participant == participant)
        .where(newest.c.status == int(Status.TRIED))
        .where(newest.c.action.not_in(sorted(actions)))
        .group_by(newest.c.action)
        .order_by(newest.c.action)
    )
    try:
        found = connection.execute(waiting).all()
    except SQLAlchemyError as error:
        logger.warning(
            "participant %s: no look for branches of actions that are gone: %s", participant, describe(error)
        )
        return
    for action, count in found:
        logger.warning(
            "participant %s: %d tried branches wait for Confirm or Cancel of action %r, which this program does not "
            "have: they stay as they are until an instance that has it gets them",
            participant,
            count,
            action,
        )
