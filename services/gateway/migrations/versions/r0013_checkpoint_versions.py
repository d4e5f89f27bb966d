"""A checkpoint of a script whose step is not known has a version: lists show which it is."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("step_is_count", sa.Boolean(), server_default=sa.false()))
