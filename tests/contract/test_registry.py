"""Participants in every store: their instances, what each can do, who was heard of, and whose database stands."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from coordinator.store import registry, schema
from coordinator.store.registry import HEARTBEAT_MS, SILENT_MS, ActionsDiffer, FenceChanged, Instance, KnownParticipant
from coordinator.store.rows import ParticipantRow
from coordinator.store.store import Store

from .rows import save_id
from .stores import KINDS, empty_store, stores

HERE, THERE = "127.0.0.1:20001", "127.0.0.1:20002"
BOTH = {"debit": "f1", "credit": "f1"}
START_MS = 1_700_000_000_000


class Registry:
    """One name, "bank", on a store, at times that a test says."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ms = START_MS

    async def hear(
        self, address: str, actions: dict[str, str] | None = None, *, after_ms: int = 0, replace_fence: bool = False
    ) -> registry.Refused | None:
        """An instance registers, so long after the last one did."""
        self.now_ms += after_ms
        row = ParticipantRow("bank", address, BOTH if actions is None else actions)
        return await self.store._run(
            lambda connection: registry.register(connection, row, self.now_ms, replace_fence=replace_fence)
        )

    async def known(self) -> KnownParticipant:
        """What is known of it."""
        (known,) = await self.store.participants()
        return known

    async def addresses(self) -> list[str]:
        """Its instances."""
        return [instance.address for instance in (await self.known()).instances]

    async def seen_ms(self, address: str) -> int:
        """When an instance was last noted as heard of."""
        a = schema.participant_addresses
        query = sa.select(a.c.seen_ms).where(a.c.address == address)
        return await self.store._run(lambda connection: int(connection.execute(query).scalar_one()))


@pytest.fixture(params=KINDS)
async def bank(request: pytest.FixtureRequest) -> AsyncIterator[Registry]:
    """On an open store of each kind."""
    url = empty_store(request)
    async with stores() as open_one:
        yield Registry(await open_one(url))


class TestInstances:
    """A name has any number of addresses."""

    async def test_there_is_none(self, bank: Registry) -> None:
        assert await bank.store.participants() == []

    async def test_they_stand_side_by_side(self, bank: Registry) -> None:
        assert await bank.hear(HERE) is None
        assert await bank.hear(THERE, {"debit": "f1"}) is None
        assert await bank.known() == KnownParticipant(
            "bank", BOTH, {}, (Instance(HERE, BOTH), Instance(THERE, {"debit": "f1"}))
        )

    async def test_names_are_kept_apart(self, bank: Registry) -> None:
        await bank.hear(HERE)
        assert await bank.store.register(ParticipantRow("shop", HERE, {"sell": "f9"}), replace_fence=False) is None
        assert [known.name for known in await bank.store.participants()] == ["bank", "shop"]
        assert await bank.store.withdraw("shop", HERE)
        assert [len(known.instances) for known in await bank.store.participants()] == [1, 0]

    async def test_many_at_once(self, bank: Registry) -> None:
        """Of one name too: none is lost, and the union is whole."""
        rows = [ParticipantRow(f"p{n}", f"127.0.0.1:{n + 1}", {"a": str(save_id())}) for n in range(6)]
        rows += [ParticipantRow("q", f"127.0.0.1:{n + 1}", {f"a{i}": "f" for i in range(n + 1)}) for n in range(6)]
        twice = [*rows, *rows]
        answers = await asyncio.gather(*(bank.store.register(row, replace_fence=False) for row in twice))
        assert answers == [None] * 24
        known = {each.name: each for each in await bank.store.participants()}
        assert len(known) == 7
        assert len(known["q"].instances) == 6
        assert set(known["q"].actions) == {f"a{n}" for n in range(6)}


class TestWithdrawal:
    """An instance stops."""

    async def test_one_of_two(self, bank: Registry) -> None:
        await bank.hear(HERE, {"debit": "f1"})
        await bank.hear(THERE)
        assert await bank.store.withdraw("bank", THERE)
        assert await bank.known() == KnownParticipant(
            "bank", {"debit": "f1"}, {"credit": "f1"}, (Instance(HERE, {"debit": "f1"}),)
        )

    async def test_the_last_leaves_what_it_could_do(self, bank: Registry) -> None:
        await bank.hear(HERE)
        assert await bank.store.withdraw("bank", HERE)
        assert await bank.known() == KnownParticipant("bank", BOTH, {}, ())
        assert await bank.hear(THERE, {"credit": "f1"}) is None
        known = await bank.known()
        assert (known.actions, known.withdrawn) == ({"credit": "f1"}, {"debit": "f1"})

    async def test_of_what_is_not_there(self, bank: Registry) -> None:
        assert not await bank.store.withdraw("bank", HERE)
        await bank.hear(HERE)
        assert not await bank.store.withdraw("bank", THERE)
        assert await bank.store.withdraw("bank", HERE)
        assert not await bank.store.withdraw("bank", HERE)


class TestHeartbeats:
    """Who is silent while others are heard of is dropped."""

    async def test_they_are_noted_a_third_of_the_way(self, bank: Registry) -> None:
        await bank.hear(HERE)
        await bank.hear(HERE, after_ms=HEARTBEAT_MS // 3 - 1)
        assert await bank.seen_ms(HERE) == START_MS
        await bank.hear(HERE, after_ms=1)
        assert await bank.seen_ms(HERE) == bank.now_ms

    async def test_a_silent_one_is_dropped_when_another_lives(self, bank: Registry) -> None:
        await bank.hear(HERE)
        await bank.hear(THERE, {"debit": "f1"})
        for _ in range(SILENT_MS // HEARTBEAT_MS):
            await bank.hear(THERE, {"debit": "f1"}, after_ms=HEARTBEAT_MS)
        assert await bank.addresses() == [HERE, THERE]
        for _ in range(2):
            await bank.hear(THERE, {"debit": "f1"}, after_ms=HEARTBEAT_MS)
        known = await bank.known()
        assert [instance.address for instance in known.instances] == [THERE]
        assert (known.actions, known.withdrawn) == ({"debit": "f1"}, {"credit": "f1"})
        await bank.hear(HERE)  # it was only slow
        assert (await bank.known()).actions == BOTH
        assert await bank.addresses() == [HERE, THERE]

    async def test_the_last_one_is_kept(self, bank: Registry) -> None:
        await bank.hear(HERE)
        await bank.hear(THERE, after_ms=100 * SILENT_MS)
        assert await bank.addresses() == [HERE, THERE], "not heard of, but nobody was for so long"
        await bank.hear(THERE, after_ms=HEARTBEAT_MS)
        assert await bank.addresses() == [THERE]
        await bank.hear(THERE, after_ms=100 * SILENT_MS)
        assert await bank.addresses() == [THERE]

    async def test_nobody_is_dropped_for_a_time_when_nobody_could_be_heard_of(self, bank: Registry) -> None:
        """The store or all coordinators were away: the first who is heard of again must not end the others."""
        await bank.hear(HERE)
        await bank.hear(THERE)
        await bank.hear(THERE, after_ms=10 * SILENT_MS)
        assert await bank.addresses() == [HERE, THERE]
        await bank.hear(HERE, after_ms=HEARTBEAT_MS)
        await bank.hear(THERE, after_ms=HEARTBEAT_MS)
        assert await bank.addresses() == [HERE, THERE]


class TestActions:
    """Instances of one name can do the same, but for what a rolling deployment adds or removes."""

    async def test_case_36_others_of_the_same_name_are_refused(self, bank: Registry) -> None:
        await bank.hear(HERE)
        difference = await bank.hear(THERE, {"debit": "f1", "refund": "f1", "audit": "f1"})
        assert difference == ActionsDiffer(HERE, ("credit",), ("audit", "refund"))
        assert await bank.known() == KnownParticipant("bank", BOTH, {}, (Instance(HERE, BOTH),))

    async def test_case_36_a_rolling_deployment_adds_first_and_removes_later(self, bank: Registry) -> None:
        more, other = {**BOTH, "refund": "f1"}, {"debit": "f1", "refund": "f1"}
        for address in (HERE, THERE):
            assert await bank.hear(address) is None
        for address in (HERE, THERE):
            assert await bank.hear(address, more) is None
        for address in (HERE, THERE):
            assert await bank.hear(address, other) is None
        known = await bank.known()
        assert (known.actions, known.withdrawn) == (other, {"credit": "f1"})

    async def test_an_instance_may_change_its_own(self, bank: Registry) -> None:
        await bank.hear(HERE)
        assert await bank.hear(HERE, {"refund": "f1"}) is None

    async def test_a_silent_instance_stands_in_nobodys_way(self, bank: Registry) -> None:
        await bank.hear(HERE)
        assert isinstance(await bank.hear(THERE, {"refund": "f1"}, after_ms=SILENT_MS - 1), ActionsDiffer)
        assert await bank.hear(THERE, {"refund": "f1"}, after_ms=1) is None

    async def test_calls_go_where_the_action_is(self, bank: Registry) -> None:
        await bank.hear(HERE, {"debit": "f1"})
        await bank.hear(THERE)
        known = await bank.known()
        assert known.addresses("credit") == [THERE]
        assert known.addresses("debit") == [HERE, THERE]
        assert known.addresses("gone") == [HERE, THERE], "one that no instance has: they know best what became of it"

    async def test_case_36_two_that_register_at_the_same_moment(self, bank: Registry) -> None:
        """The later one sees the earlier one's, though that was not committed when it came."""
        await bank.hear(HERE, {"debit": "f1"})
        engine = bank.store._engine
        assert engine is not None
        writes = threading.Event()

        def on_statement(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            if not statement.startswith("SELECT"):
                writes.set()

        with engine.connect() as first:
            row = ParticipantRow("bank", THERE, {"debit": "f1", "credit": "f1"})
            assert registry.register(first, row, START_MS, replace_fence=False) is None
            sa.event.listen(engine, "before_cursor_execute", on_statement)
            try:
                second = asyncio.create_task(bank.hear("127.0.0.1:20003", {"debit": "f1", "refund": "f1"}))
                assert await asyncio.to_thread(writes.wait, 30)
                first.commit()
                assert await second == ActionsDiffer(THERE, ("credit",), ("refund",))
            finally:
                sa.event.remove(engine, "before_cursor_execute", on_statement)


class TestFences:
    """The database that holds each action's fence (C3)."""

    async def test_another_one_stands_in_the_way(self, bank: Registry) -> None:
        await bank.hear(HERE)
        changed = {"debit": "f1", "credit": "f2"}
        assert await bank.hear(THERE, changed) == FenceChanged("credit", "f1", "f2")
        assert await bank.addresses() == [HERE]
        assert await bank.hear(THERE, changed, replace_fence=True) is None
        known = await bank.known()
        assert known.actions == changed
        assert [instance.address for instance in known.instances] == [THERE], "the other is on the old database"

    async def test_it_is_remembered_while_its_action_is_away(self, bank: Registry) -> None:
        """Else two registrations, one without the action, would change its database with nobody asked."""
        await bank.hear(HERE)
        await bank.hear(HERE, {"credit": "f1"})
        assert (await bank.known()).fence_id("debit") == "f1"
        assert await bank.hear(HERE, {"debit": "f2", "credit": "f1"}) == FenceChanged("debit", "f1", "f2")

    async def test_it_is_remembered_while_everybody_is_away(self, bank: Registry) -> None:
        await bank.hear(HERE)
        await bank.store.withdraw("bank", HERE)
        assert await bank.hear(THERE, {"debit": "f2", "credit": "f1"}) == FenceChanged("debit", "f1", "f2")


class TestOlderPrograms:
    """They know one address for each name."""

    async def test_what_they_registered_is_an_instance(self, bank: Registry) -> None:
        p = schema.participants
        values = {"name": "bank", "address": HERE, "actions": BOTH, "withdrawn": {}, "updated_ms": START_MS}
        await bank.store._run(lambda connection: connection.execute(p.insert().values(**values)))
        assert await bank.known() == KnownParticipant("bank", BOTH, {}, (Instance(HERE, BOTH),))
        assert await bank.hear(HERE) is None
        assert await bank.addresses() == [HERE]
        assert await bank.store.withdraw("bank", HERE)
        assert await bank.addresses() == []

    async def test_they_find_an_address(self, bank: Registry) -> None:
        async def address() -> str:
            query = sa.select(schema.participants.c.address)
            return await bank.store._run(lambda connection: str(connection.execute(query).scalar_one()))

        await bank.hear(HERE)
        await bank.hear(THERE)
        assert await address() == THERE
        await bank.store.withdraw("bank", THERE)
        assert await address() == HERE
        await bank.store.withdraw("bank", HERE)
        assert await address() == "", "another service may answer at the old one by and by"
