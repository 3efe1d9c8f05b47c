"""What is stored comes back as it was, on every database; what cannot be stored is refused by name."""

from typing import Any

import pytest

from participant_sdk.databases import postgresql_script
from participant_sdk.databases.database import Script
from participant_sdk.databases.postgresql_pipeline import send_simple
from participant_sdk.databases.postgresql_script import PgScript, Prepared
from participant_sdk.idempotency.errors import ScopeMissing
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State
from participant_sdk.idempotency.store import Outcome
from tests.contract.idempotency.world import DONE, TABLE, World, claim_of

ODD = "k\u00e4se \u65e5\u672c \U0001f600 'quoted' \"double\" \\back %s %% :name $1 {brace}\n\t\x7f"


async def test_odd_text(world: World) -> None:
    for commit in (False, True):
        claim = claim_of(tenant=ODD, operation=ODD, owner=ODD, key_hint="'\\%\U0001f600")
        held = await world.claimed(claim)
        record = await world.read(claim.key_hash)
        assert (record.tenant, record.operation, record.key_hint) == (ODD, ODD, "'\\%\U0001f600")
        async with world.transaction() as transaction:
            await transaction.work("order")
            outcome = Outcome(State.FAILED_FINAL, None, 1_000, ODD)
            await transaction.run(world.store.complete(held, outcome, commit=commit))
            await transaction.commit()
        assert (await world.read(claim.key_hash)).reason == ODD
        atomic = claim_of(tenant=ODD, operation=ODD)
        async with world.transaction() as transaction:
            await transaction.run(world.store.meet(atomic.key_hash, 100))
            await transaction.work("order")
            await transaction.run(world.store.write(atomic, None, outcome, commit=commit))
            await transaction.commit()
        record = await world.read(atomic.key_hash)
        assert (record.tenant, record.operation, record.reason) == (ODD, ODD, ODD)


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)
async def test_arguments_within_the_text_of_a_query_arrive_as_they_are(world: World) -> None:
    name, query, texts = b"tricord_odd", b"SELECT $1, $2, $3", (25, 25, 25)

    def script(setting: str) -> Script[list[bytes | None]]:
        yield PgScript(f"SET LOCAL standard_conforming_strings = {setting};", begin="BEGIN;")
        yield PgScript("", lead=[Prepared(name, query, texts, None)])
        executed = Prepared(name, query, texts, (ODD, "plain", None))
        (found,) = yield PgScript("", executed, as_text=True)
        yield PgScript("DEALLOCATE tricord_odd;ROLLBACK")
        return [found.get_value(0, column) for column in range(3)]

    for setting in ("on", "off"):
        async with world.transaction() as transaction:
            assert await transaction.run(script(setting)) == [ODD.encode(), b"plain", None]


@pytest.mark.parametrize("flavour", ["postgres-sync"], indirect=True)
async def test_nothing_of_the_users_stands_in_a_statements_text(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server logs it if it fails."""
    sent: list[bytes] = []

    def noted(connection: Any, text: bytes) -> Any:
        sent.append(text)
        return send_simple(connection, text)

    monkeypatch.setattr(postgresql_script, "send_simple", noted)
    secret = "secret-of-acme"
    outcome = Outcome(
        State.SUCCEEDED, Answer(Codec.HTTP, 201, ((b"location", secret.encode()),), secret.encode()), 1_000
    )
    claim, atomic = claim_of(tenant=secret, operation=secret), claim_of(tenant=secret, operation=secret)
    held = await world.claimed(claim)
    async with world.transaction() as transaction:
        await transaction.run(world.store.complete(held, outcome, commit=True))
        await transaction.commit()
    async with world.transaction() as transaction:
        await transaction.run(world.store.meet(atomic.key_hash, 100))
        await transaction.run(world.store.write(atomic, None, outcome, commit=True))
        await transaction.commit()
    said = b" ".join(sent)
    assert atomic.key_hash.hex().encode() in said  # which says nothing
    assert secret.encode() not in said
    assert secret.encode().hex().encode() not in said


async def test_tenants_that_differ_in_case_or_spaces_are_kept_apart(world: World) -> None:
    for tenant in ("a", "A", "a ", "\u00e4", ""):
        claim = claim_of(tenant=tenant)
        await world.claimed(claim)
        assert (await world.read(claim.key_hash)).tenant == tenant


BAD = (
    ("tenant", "a\0b", ScopeMissing),
    ("tenant", "\ud800", ScopeMissing),
    ("tenant", "\u00e4" * 101, ScopeMissing),
    ("operation", "a\0b", ValueError),
    ("operation", "x" * 201, ValueError),
    ("owner", "\0", ValueError),
    ("owner", "x" * 101, ValueError),
    ("key_hash", b"short", ValueError),
    ("fingerprint", Fingerprint(1, b"x" * 33), ValueError),
    ("fingerprint", Fingerprint(1 << 15, b""), ValueError),
    ("lease_ms", -1, ValueError),
    ("lease_ms", 1 << 40, ValueError),
)


async def test_what_cannot_be_stored_is_refused_by_name(world: World) -> None:
    good = claim_of("good")
    await world.write(good, Outcome(State.FAILED_RETRYABLE, None, 60_000))
    met = await world.read(good.key_hash)
    for field, value, error in BAD:
        bad = claim_of("bad", **{field: value})
        for script in (world.store.claim(bad), world.store.take_over(bad, met), world.store.write(bad, met, DONE)):
            with pytest.raises(error, match=field):
                await world.do(script)
    assert world.query(f"SELECT count(*) FROM {TABLE}") == [(1,)]
    assert (await world.read(good.key_hash)).fence == met.fence


async def test_a_time_to_live_that_cannot_be(world: World) -> None:
    held = await world.claimed(claim_of())
    for ttl_ms in (-1, None, 1 << 40):
        outcome = Outcome(State.SUCCEEDED, None, ttl_ms)
        for script in (world.store.complete(held, outcome), world.store.settle(held, outcome)):
            with pytest.raises(ValueError, match="ttl_ms"):
                await world.do(script)


async def test_a_recovery_point_that_cannot_be_stored(world: World) -> None:
    held = await world.claimed(claim_of())
    for point in ("a\0b", "x" * 101, "\udfff"):
        with pytest.raises(ValueError, match="recovery point"):
            await world.do(world.store.reach(held, point, b""))


async def test_text_for_people_is_made_fit(world: World) -> None:
    """A key's first characters and a reason come from outside: nothing in them may make a run fail."""
    claim = claim_of(key_hint="a\0b\ud800" + "x" * 20)
    held = await world.claimed(claim)
    assert await world.do(
        world.store.settle(held, Outcome(State.FAILED_FINAL, None, 1_000, "n\0o\ud800" + "x" * 9_000))
    )
    record = await world.read(claim.key_hash)
    assert record.key_hint == "a\ufffdb?" + "x" * 12
    assert record.reason == "n\ufffdo?" + "x" * 1_996


async def test_bodies_of_any_size_and_all_bytes(world: World) -> None:
    headers = ((b"x-" + bytes(range(1, 30)), b"\x00\xff" * 300), (b"", b""), (b"x", b"1"), (b"x", b"2"))
    for size in (0, 1, 70_000, 3 << 20):
        body = (bytes(range(256)) * (size // 256 + 1))[:size]
        outcome = Outcome(State.SUCCEEDED, Answer(Codec.GRPC, 5, headers, body), 60_000)
        leased, atomic = claim_of(), claim_of()
        held = await world.claimed(leased)
        async with world.transaction() as transaction:
            await transaction.work("order")
            await transaction.run(world.store.complete(held, outcome))
            await transaction.commit()
        await world.write(atomic, outcome)
        for claim in (leased, atomic):
            assert (await world.read(claim.key_hash)).answer == outcome.answer
            met = await world.do(world.store.claim(claim))
            assert isinstance(met, Record)
            assert met.answer == outcome.answer


async def test_phase_data_of_any_size(world: World) -> None:
    held = await world.claimed(claim_of())
    async with world.transaction() as transaction:
        await transaction.run(world.store.reach(held, "x" * 100, b"\x00\xff" * 40_000, commit=True))
    record = await world.read(held.key_hash)
    assert (record.recovery_point, record.phase_data) == ("x" * 100, b"\x00\xff" * 40_000)


async def test_times_are_the_databases(world: World) -> None:
    """Also in the middle of a long local transaction, where `now()` would be its beginning."""
    claim, atomic = claim_of(), claim_of()
    held = await world.claimed(claim)
    async with world.transaction() as transaction:
        await transaction.work("order")
        (began,) = world.query(f"SELECT {_now_ms(world)}")[0]
        while world.query(f"SELECT {_now_ms(world)}")[0][0] < began + 30:
            pass
        await transaction.run(world.store.complete(held, DONE, commit=True))
    ((created, completed, expires, fence),) = world.query(
        f"SELECT created_ms, completed_ms, expires_ms, fence FROM {TABLE}"
    )
    assert completed >= began + 29
    assert expires - completed in (60_000, 60_001)
    assert abs(fence // 1000 - created) <= 5
    assert abs(created - began) < 60_000
    record = await world.write(atomic, DONE)
    assert record.age_ms < 60_000


def _now_ms(world: World) -> str:
    words = world.store._words  # type: ignore[attr-defined]
    return str(words["now_ms"])


async def test_read_leaves_nothing_open(world: World) -> None:
    claim = claim_of()
    async with world.transaction() as reader:
        assert await reader.run(world.store.read(claim.key_hash)) is None
        await world.claimed(claim)
        record = await reader.run(world.store.read(claim.key_hash))
        assert record is not None
        assert record.state is State.PROCESSING
        world.change(f"DELETE FROM {TABLE}")
        assert await reader.run(world.store.read(claim.key_hash)) is None
