"""A list of runs folds the trials of a study: a run knows its study, and a study what its trials have reached."""

import sqlalchemy as sa
from alembic import op

from services.gateway import store
from services.gateway.migrations import clear_rows

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("runs", sa.Column("study", store.Text(), nullable=True))
    op.create_index("ix_runs_study_requested_at_run_id", "runs", ["study", "requested_at", "run_id"])
    op.create_index("ix_runs_study_state_requested_at_run_id", "runs", ["study", "state", "requested_at", "run_id"])
    for column in (
        sa.Column("planned_trials", sa.BigInteger(), nullable=True),
        sa.Column("trial_states", sa.JSON(), nullable=True),
        sa.Column("objective", store.Text(), nullable=True),
        sa.Column("mode", store.Text(), nullable=True),
        sa.Column("best_value", sa.Double(), nullable=True),
    ):
        op.add_column("studies", column)
    clear_rows(op.get_bind())
