"""The first schema: transactions, participants, the store's identity."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "tricord_transaction",
        sa.Column("xid", sa.LargeBinary, primary_key=True),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("key", sa.LargeBinary, nullable=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("participants", sa.Text, nullable=False),
        sa.Column("format", sa.SmallInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("save_id", sa.BigInteger, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("attention", sa.SmallInteger, nullable=False),
        sa.Column("wake_ms", sa.BigInteger, nullable=True),
        sa.Column("updated_ms", sa.BigInteger, nullable=False),
        sa.Column("progress", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("key", name="tricord_transaction_key"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE tricord_transaction SET (fillfactor = 50)")
    op.create_index(
        "tricord_transaction_due",
        "tricord_transaction",
        ["wake_ms"],
        postgresql_where=sa.text("wake_ms IS NOT NULL"),
        sqlite_where=sa.text("wake_ms IS NOT NULL"),
    )
    op.create_table(
        "tricord_participant",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("actions", sa.JSON, nullable=False),
        sa.Column("withdrawn", sa.JSON, nullable=False),
        sa.Column("updated_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "tricord_store",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("store_id", sa.Text, nullable=False),
        sa.Column("incarnation", sa.Text, nullable=False),
    )
