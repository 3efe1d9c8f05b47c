"""The handlers of the simulated participants: they move money, and misbehave as their branch's ``Behaviour`` says.

A branch's payload is "account amount": a negative amount is taken from the account, and reserved (``held``) by Try;
a positive one is promised to it (``due``). "account amount participant action account amount ...": its Try calls that
participant directly, with what follows as the payload. Each handler counts its effect in a row of its own, in the same
local transaction, and looks at nothing that would keep a second Confirm from doing it again: only the fence does.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import partial
from typing import Final, cast

import psycopg
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk.actions import ActionDefinition, Actions, complete_actions
from participant_sdk.call import Call
from participant_sdk.errors import Refused
from participant_sdk.fence import Phase
from tests.simulator.database_client import SimConnection
from tests.simulator.database_server import Session
from tests.simulator.transactions import Account, Key

MOVE: Final = "move"
CHARGE: Final = "charge"
"""As MOVE, at a provider outside of the database: an external action."""
ACTIONS: Final = (MOVE, CHARGE)
DATABASE_ERROR: Final = "database_error"
"""The reason of refusals that a handler has made of an error."""


@unique
class Way(Enum):
    """How a branch's handlers behave."""

    PLAIN = "does as it is told"
    SLOW = "its Try takes ``ms`` before it has its effect"
    SLOW_AFTER = "its Try takes ``ms`` after it had its effect"
    REFUSES = "its Try refuses"
    REFUSES_LATE = "its Try refuses after it had its effect, which is rolled back"
    FAILS = "the handler of ``phase`` fails its first ``times`` runs; it had its effect, which is rolled back"
    SWALLOWS = "the database's errors in Try are swallowed, and those of the call that it makes"
    REFUSES_ERRORS = "the database's errors in Try are made a refusal of"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """See Way. ``times`` None: for ever."""

    way: Way = Way.PLAIN
    ms: int = 0
    phase: Phase = Phase.TRY
    times: int | None = None


PLAIN: Final = Behaviour()


class BusinessError(Exception):
    """What a handler fails of."""


class Provider:
    """A service outside of the database: what is authorised there, by key. Its answers may be lost.

    As real ones, it knows a key again; a key that was voided can be authorised again.
    """

    def __init__(self) -> None:
        self.authorised: dict[Key, int] = {}
        self.captured: dict[Key, int] = {}
        self.calls: Counter[str] = Counter()

    def authorise(self, key: Key, amount: int) -> None:
        """Reserve, once per key."""
        self.calls["authorise"] += 1
        if key not in self.captured:
            self.authorised[key] = amount

    def capture(self, key: Key) -> None:
        """Make it final."""
        self.calls["capture"] += 1
        if key in self.authorised:
            self.captured[key] = self.authorised.pop(key)

    def void(self, key: Key) -> None:
        """Give it back."""
        self.calls["void"] += 1
        self.authorised.pop(key, None)


async def _nobody_below(_call: Call[bytes]) -> None:
    """Calls nobody."""


@dataclass(slots=True)
class Business:
    """What the handlers of one participant know besides their database; survives its processes."""

    rng: random.Random
    behaviour_of: Callable[[str, int], Behaviour] = lambda _xid, _branch_id: PLAIN
    provider: Provider = field(default_factory=Provider)
    provider_loses: float = 0.0
    """How often a provider's answer is lost."""
    runs: Counter[Key] = field(default_factory=Counter)
    """Of each handler: (xid, branch_id, phase)."""
    call_below: Callable[[Call[bytes]], Awaitable[None]] = _nobody_below
    """Makes the direct call that a payload asks for, from the running process. Raises Refused, BusinessError."""
    heals: bool = False
    """Nothing fails any more."""


def payload_of(account: str, amount: int, below: tuple[str, str, bytes] | None = None) -> bytes:
    """The payload of a branch. ``below``: the participant, action and payload of the call that its Try makes."""
    own = f"{account} {amount}".encode()
    return own if below is None else b" ".join((own, below[0].encode(), below[1].encode(), below[2]))


def read_payload(payload: bytes) -> tuple[str, int]:
    """Account and amount."""
    name, amount = payload.decode().split(" ", 2)[:2]
    return name, int(amount)


def read_below(payload: bytes) -> tuple[str, str, bytes] | None:
    """The call that its Try makes."""
    words = payload.split(b" ", 4)
    return None if len(words) < 5 else (words[2].decode(), words[3].decode(), words[4])


def effect_key(xid: str, branch_id: int, phase: Phase) -> Key:
    """The row in which a handler's effect is counted."""
    return "effect", xid, branch_id, phase.name


def actions_of(business: Business, lease_ms: int, *, batch: bool = False) -> Actions:
    """The actions of a participant, complete and checked as the SDK checks any. ``lease_ms``: of CHARGE's intents.

    ``batch``: MOVEs of one account run together.
    """

    async def move(call: Call[bytes], db: AsyncConnection) -> bytes:
        await _below(business, call)
        return await _try_move(business, call, cast(SimConnection, db))

    async def confirm_move(call: Call[bytes], db: AsyncConnection) -> None:
        await _phase2(business, Phase.CONFIRM, call, cast(SimConnection, db))

    async def cancel_move(call: Call[bytes], db: AsyncConnection) -> None:
        await _phase2(business, Phase.CANCEL, call, cast(SimConnection, db))

    async def charge(call: Call[bytes], db: AsyncConnection) -> bytes:
        await _below(business, call)
        return await _try_charge(business, call)

    async def confirm_charge(call: Call[bytes], db: AsyncConnection) -> None:
        await _ask_provider(business, partial(business.provider.capture, (call.xid, call.branch_id)))
        await cast(SimConnection, db).ask(partial(_count_effect, call, Phase.CONFIRM))

    async def cancel_charge(call: Call[bytes], db: AsyncConnection) -> None:
        await _ask_provider(business, partial(business.provider.void, (call.xid, call.branch_id)))
        await cast(SimConnection, db).ask(partial(_count_effect, call, Phase.CANCEL))

    key = (lambda payload: read_payload(payload)[0]) if batch else None
    moving = ActionDefinition(MOVE, move, asynchronous=True, batch_key=key)
    moving.confirm(confirm_move)
    moving.cancel(cancel_move)
    charging = ActionDefinition(CHARGE, charge, asynchronous=True, lease_ms=lease_ms)
    charging.confirm(confirm_charge)
    charging.cancel(cancel_charge)
    return complete_actions("simulated", {MOVE: moving, CHARGE: charging})


async def _below(business: Business, call: Call[bytes]) -> None:
    try:
        await business.call_below(call)
    except (Refused, BusinessError):
        if business.behaviour_of(call.xid, call.branch_id).way is not Way.SWALLOWS:
            raise


async def _try_move(business: Business, call: Call[bytes], db: SimConnection) -> bytes:
    behaviour = business.behaviour_of(call.xid, call.branch_id)
    run = _count_run(business, call, Phase.TRY)
    if behaviour.way is Way.SLOW:
        await asyncio.sleep(behaviour.ms / 1000)
    if behaviour.way is Way.REFUSES:
        raise Refused("not_today")
    try:
        enough, _ = await db.ask(partial(_reserve, call), partial(_count_effect, call, Phase.TRY))
    except psycopg.Error as error:
        if behaviour.way is Way.REFUSES_ERRORS:
            raise Refused(DATABASE_ERROR, str(error)) from error
        if behaviour.way is not Way.SWALLOWS:
            raise
    else:
        if not enough:
            raise Refused("insufficient_funds")
    if behaviour.way is Way.SLOW_AFTER:
        await asyncio.sleep(behaviour.ms / 1000)
    if behaviour.way is Way.REFUSES_LATE:
        raise Refused("not_after_all")
    _fail(business, behaviour, Phase.TRY, run)
    return f"reserved by run {run}".encode()


async def _phase2(business: Business, phase: Phase, call: Call[bytes], db: SimConnection) -> None:
    behaviour = business.behaviour_of(call.xid, call.branch_id)
    run = _count_run(business, call, phase)
    await db.ask(partial(_settle, call, phase), partial(_count_effect, call, phase))
    _fail(business, behaviour, phase, run)


async def _try_charge(business: Business, call: Call[bytes]) -> bytes:
    behaviour = business.behaviour_of(call.xid, call.branch_id)
    run = _count_run(business, call, Phase.TRY)
    if behaviour.way in (Way.REFUSES, Way.REFUSES_LATE):
        raise Refused("not_today")
    if behaviour.way is Way.SLOW:
        await asyncio.sleep(behaviour.ms / 1000)
    _, amount = read_payload(call.payload)
    await _ask_provider(business, partial(business.provider.authorise, (call.xid, call.branch_id), amount))
    _fail(business, behaviour, Phase.TRY, run)
    return f"authorised by run {run}".encode()


async def _ask_provider(business: Business, request: Callable[[], None]) -> None:
    rng = business.rng
    await asyncio.sleep(rng.uniform(0.0005, 0.005))
    request()
    if not business.heals and rng.random() < business.provider_loses:
        raise BusinessError("the provider did not answer")
    await asyncio.sleep(rng.uniform(0.0005, 0.005))


def _count_run(business: Business, call: Call[bytes], phase: Phase) -> int:
    key = (call.xid, call.branch_id, phase)
    business.runs[key] += 1
    return business.runs[key]


def _fail(business: Business, behaviour: Behaviour, phase: Phase, run: int) -> None:
    fails = behaviour.way is Way.FAILS and behaviour.phase is phase and not business.heals
    if fails and (behaviour.times is None or run <= behaviour.times):
        raise BusinessError(f"run {run} of {phase.name} fails")


# --- statements ----------------------------------------------------------------------------------------------


def _account(call: Call[bytes], session: Session) -> tuple[Key, Account, int]:
    name, amount = read_payload(call.payload)
    key = ("account", name)
    return key, session.begun().lock(key), amount


def _reserve(call: Call[bytes], session: Session) -> bool:
    key, account, amount = _account(call, session)
    if amount < 0:
        if account.balance - account.held < -amount:
            return False
        account = account._replace(held=account.held - amount)
    else:
        account = account._replace(due=account.due + amount)
    session.begun().write(key, account)
    return True


def _settle(call: Call[bytes], phase: Phase, session: Session) -> None:
    key, (balance, held, due), amount = _account(call, session)
    if phase is Phase.CONFIRM:
        balance += amount
    session.begun().write(key, Account(balance, held + min(amount, 0), due - max(amount, 0)))


def _count_effect(call: Call[bytes], phase: Phase, session: Session) -> None:
    key = effect_key(call.xid, call.branch_id, phase)
    count: int | None = session.begun().lock(key)
    session.begun().write(key, (count or 0) + 1)
