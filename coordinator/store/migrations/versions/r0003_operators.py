"""Labels, by which operators find transactions; the record of what operators have done; how often a row was claimed.

Only adds (protocol G2): programs that do not know of it go on working, beside newer ones.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two tables and two columns."""
    op.create_table(
        "tricord_label",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, primary_key=True),
        sa.Column("xid", sa.LargeBinary, primary_key=True),
    )
    op.create_index("tricord_label_xid", "tricord_label", ["xid"])
    op.create_table(
        "tricord_audit",
        sa.Column("id", sa.LargeBinary, primary_key=True),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("xid", sa.LargeBinary, nullable=True),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("peer", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("before", sa.Text, nullable=False),
        sa.Column("after", sa.Text, nullable=False),
    )
    op.create_index("tricord_audit_xid", "tricord_audit", ["xid"])
    zero = sa.text("0")
    op.add_column("tricord_transaction", sa.Column("claims", sa.SmallInteger, nullable=False, server_default=zero))
    op.add_column("tricord_transaction", sa.Column("claimed_version", sa.Integer, nullable=False, server_default=zero))
