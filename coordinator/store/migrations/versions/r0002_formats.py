"""Several addresses of one participant; which row format may be written, and which programs are too old.

Only adds (protocol G2): programs that do not know of it go on working, beside newer ones.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a table, and columns with defaults."""
    op.create_table(
        "tricord_participant_address",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("address", sa.Text, primary_key=True),
        sa.Column("actions", sa.JSON, nullable=False),
        sa.Column("seen_ms", sa.BigInteger, nullable=False),
    )
    for name in ("format", "oldest_program"):
        op.add_column("tricord_store", sa.Column(name, sa.SmallInteger, nullable=False, server_default=sa.text("1")))
