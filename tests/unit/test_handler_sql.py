"""Which SQL of a handler would begin or end the local transaction that it is only lent."""

import pytest

from participant_sdk.handler import ending_verb


@pytest.mark.parametrize(
    ("statement", "verb"),
    [
        ("COMMIT", "COMMIT"),
        ("  commit work;", "COMMIT"),
        ("END", "END"),
        ("end transaction", "END"),
        ("ABORT", "ABORT"),
        ("BEGIN IMMEDIATE", "BEGIN"),
        ("start  transaction", "START TRANSACTION"),
        ("PREPARE TRANSACTION 'x'", "PREPARE TRANSACTION"),
        ("ROLLBACK", "ROLLBACK"),
        ("rollback and chain", "ROLLBACK"),
        ("-- done\n/* now */ COMMIT", "COMMIT"),
        ("SELECT 1; COMMIT", "COMMIT"),
        ("ROLLBACK PREPARED 'to'", "ROLLBACK"),
    ],
)
def test_what_would_end_it_is_found(statement: str, verb: str) -> None:
    assert ending_verb(statement) == verb


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1",
        "ROLLBACK TO SAVEPOINT a",
        "rollback to a",
        "ROLLBACK TRANSACTION TO SAVEPOINT a",
        "ROLLBACK WORK TO a",
        "SAVEPOINT begin_here",
        "PREPARE p AS SELECT 1",
        "SELECT CASE WHEN a THEN 1 ELSE 2 END FROM t",
        "INSERT INTO notes VALUES ('a; COMMIT; it''s')",
        'SELECT "a;END" FROM t',
        "SELECT 1 -- ; COMMIT",
        "DO $body$ BEGIN PERFORM 1; END $body$",
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; END",
        "UPDATE t SET begin = 1",
    ],
)
def test_everything_else_is_the_handlers_own_affair(statement: str) -> None:
    assert ending_verb(statement) is None
