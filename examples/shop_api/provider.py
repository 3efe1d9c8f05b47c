"""A payment provider that does not belong to the shop: it charges a card once per key, and may lose its answer."""

from __future__ import annotations

import os
import random
import sqlite3
from typing import Annotated, Any
from uuid import uuid4

from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse
from pydantic import BaseModel

DECLINED_CARD = "0000"
SLOW_CARD = "9999"
SLOW_ANSWERS = 8
"""So many answers about that card are lost, of each key."""
_TABLE = """
CREATE TABLE IF NOT EXISTS charge (
    key TEXT PRIMARY KEY, id TEXT, card TEXT, cents INTEGER, declined INTEGER, asked INTEGER
)"""


class Charge(BaseModel):
    """What is to be paid, in cents."""

    card: str
    cents: int


def create_provider() -> FastAPI:
    """For `uvicorn --factory`. PROVIDER_DATABASE: an SQLite file; PROVIDER_LOSES: the share of answers lost."""
    path = os.environ.get("PROVIDER_DATABASE", "provider.db")
    loses = float(os.environ.get("PROVIDER_LOSES", "0"))
    with _open(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(_TABLE)
    app = FastAPI(title="Payment provider")

    @app.post("/charges", status_code=201)
    def charge(charge: Charge, idempotency_key: Annotated[str, Header()]) -> Any:
        with _open(path) as db:
            db.execute(
                "INSERT INTO charge VALUES (?, ?, ?, ?, ?, 1) ON CONFLICT DO UPDATE SET asked = asked + 1",
                (idempotency_key, uuid4().hex, charge.card, charge.cents, charge.card == DECLINED_CARD),
            )
            query = "SELECT id, card, cents, declined, asked FROM charge WHERE key = ?"
            id, card, cents, declined, asked = db.execute(query, (idempotency_key,)).fetchone()
        if random.random() < loses or (card == SLOW_CARD and asked <= SLOW_ANSWERS):
            return JSONResponse({"detail": "the charge was made, and this answer says that it may not have been"}, 503)
        if (card, cents) != (charge.card, charge.cents):
            return JSONResponse({"detail": "the key belongs to another charge"}, 422)
        return JSONResponse({"detail": "declined"}, 402) if declined else {"charge": id}

    @app.get("/charges")
    def charges() -> list[str]:
        with _open(path) as db:
            return [id for (id,) in db.execute("SELECT id FROM charge WHERE NOT declined")]

    return app


def _open(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=30.0)
