"""The checkpoints of a run are listed in pages: the index has their whole order."""

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_index("ix_checkpoints_run_id_step_generation_uri", "checkpoints", ["run_id", "step", "generation", "uri"])
    op.drop_index("ix_checkpoints_run_id_step", "checkpoints")
