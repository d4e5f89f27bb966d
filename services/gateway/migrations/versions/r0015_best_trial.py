"""``best`` of a study is the best trial so far, also before the study has completed."""

from alembic import op

from services.gateway.migrations import clear_rows

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    clear_rows(op.get_bind())
