"""The RPC of the doctor: one look at a time, findings as they are made."""

from __future__ import annotations

from collections.abc import AsyncIterator

import sqlalchemy as sa
import structlog

from tricord.v1 import operator_pb2 as pb

from .doctor import Finding
from .doctor_facts import Examination
from .errors import InvalidRequest, NotFound, TooMuch, Violation
from .operator_audit import DONE, Asker, asked_row, outcome_row, read_asker
from .operator_base import OperatorBase
from .rpc import Context, answering_stream
from .store import audit, examine
from .wire import check_name, duration_ms
from .wire_open import raise_wrong

_log = structlog.get_logger(__name__)

GRACE_MS_DEFAULT = 300_000
GRACE_MS_MIN, GRACE_MS_MAX = 1_000, 30 * 86_400_000


class OperatorDoctor(OperatorBase):
    """Examine."""

    @answering_stream
    async def Examine(self, request: pb.ExamineRequest, context: Context) -> AsyncIterator[pb.ExamineResponse]:
        """What does not fit; with ``mend``, what can be mended safely is."""
        grace_ms = await self._check(request)
        asker = Asker("", "", "")
        if request.mend:
            wrong: list[Violation] = []
            asker = read_asker(request.actor, "", context.peer(), wrong)
            raise_wrong(wrong)
        if self._examining.locked():
            raise TooMuch("another examination is running at this coordinator; ask again", retry_s=5.0)
        async with self._examining:
            examination = Examination(
                self._engine.store, self._participants, self._settings, grace_ms, request.participant
            )
            async for told in examination.run():
                if isinstance(told, str):
                    yield pb.ExamineResponse(progress=told)
                else:
                    mended = request.mend and told.mendable and await self._mend(told, asker)
                    yield pb.ExamineResponse(finding=_message(told, mended))

    async def _check(self, request: pb.ExamineRequest) -> int:
        """The grace in ms. Raises InvalidRequest, NotFound, StoreError."""
        grace_ms = duration_ms(request.grace) if request.HasField("grace") else GRACE_MS_DEFAULT
        if not GRACE_MS_MIN <= grace_ms <= GRACE_MS_MAX:
            raise InvalidRequest(Violation("grace", f"is {grace_ms} ms; it must be 1 s to 30 days"))
        if request.participant:
            check_name("participant", request.participant)
            await self._participants.refresh()
            if request.participant not in self._participants.known:
                raise NotFound(f"no participant {request.participant} is registered", reason="UNKNOWN_PARTICIPANT")
        return grace_ms

    async def _mend(self, finding: Finding, asker: Asker) -> bool:
        """In one local transaction with its record; there is none of what was not changed."""
        xid, now_ms = bytes.fromhex(finding.xid), self._engine.store.now_ms()
        asked = asked_row(now_ms, "mend", xid, asker, {"code": finding.code, "problem": finding.problem})
        done = outcome_row(asked, now_ms, DONE, {"wake_ms": now_ms})

        def mend(connection: sa.Connection) -> bool:
            made_due = examine.make_due(connection, xid, now_ms)
            if made_due:
                audit.append(connection, [asked, done])
            return made_due

        mended = await self._engine.store.within(mend)
        _log.info("doctor.made_due", xid=finding.xid, code=finding.code, mended=mended)
        return mended


def _message(finding: Finding, mended: bool) -> pb.Finding:
    return pb.Finding(
        severity=int(finding.severity),  # type: ignore[arg-type]  # the same numbers; a test compares them
        code=finding.code,
        participant=finding.participant,
        xid=finding.xid,
        branch_id=finding.branch_id,
        problem=finding.problem,
        advice=finding.advice,
        mendable=finding.mendable,
        mended=mended,
    )
