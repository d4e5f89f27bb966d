"""The first tables that are made by a revision: those before were dropped and made anew with each change."""

import sqlalchemy as sa
from alembic import op

from services.gateway import store

revision = "0011"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("uri", store.Text(), nullable=False),
        sa.Column("run_id", store.Text(), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=True),
        sa.Column("samples_consumed", sa.BigInteger(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("committed_at", sa.Double(), nullable=True),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("final", sa.Boolean(), nullable=True),
        sa.Column("exactness", store.Text(), nullable=True),
        sa.Column("state_digest", store.Text(), nullable=True),
        sa.Column("manifest_sha256", store.Text(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.Column("deleted_reason", store.Text(), nullable=True),
        sa.PrimaryKeyConstraint("uri"),
        if_not_exists=True,
    )
    op.create_index("ix_checkpoints_run_id_step", "checkpoints", ["run_id", "step"], if_not_exists=True)
    op.create_table(
        "events",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("subject", store.Text(), nullable=False),
        sa.Column("type", store.Text(), nullable=False),
        sa.Column("event_id", store.Text(), nullable=False),
        sa.Column("causation_id", store.Text(), nullable=False),
        sa.Column("correlation_id", store.Text(), nullable=False),
        sa.Column("run_id", store.Text(), nullable=True),
        sa.Column("summary", store.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("sequence"),
        if_not_exists=True,
    )
    op.create_index("ix_events_run_id_sequence", "events", ["run_id", "sequence"], if_not_exists=True)
    op.create_index("ix_events_time", "events", ["time"], if_not_exists=True)
    op.create_table(
        "ingestions",
        sa.Column("ingestion_id", store.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=True),
        sa.Column("fingerprint", store.Text(), nullable=True),
        sa.Column("shard_bytes", sa.BigInteger(), nullable=True),
        sa.Column("found", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("dataset_id", store.Text(), nullable=True),
        sa.Column("failed", store.Text(), nullable=True),
        sa.PrimaryKeyConstraint("ingestion_id"),
        if_not_exists=True,
    )
    op.create_index(
        "ix_ingestions_dataset_id_at_ingestion_id",
        "ingestions",
        ["dataset_id", "at", "ingestion_id"],
        if_not_exists=True,
    )
    op.create_index(
        "ix_ingestions_fingerprint_dataset_id", "ingestions", ["fingerprint", "dataset_id"], if_not_exists=True
    )
    op.create_table(
        "models",
        sa.Column("name", store.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("run_id", store.Text(), nullable=True),
        sa.Column("checkpoint_uri", store.Text(), nullable=True),
        sa.Column("dataset_id", store.Text(), nullable=True),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("previous_run_id", store.Text(), nullable=True),
        sa.Column("reason", store.Text(), nullable=True),
        sa.Column("rollback", sa.Boolean(), nullable=True),
        sa.Column("promoted_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", "version"),
        if_not_exists=True,
    )
    op.create_index("ix_models_run_id", "models", ["run_id"], if_not_exists=True)
    op.create_table(
        "nodes",
        sa.Column("node_id", store.Text(), nullable=False),
        sa.Column("incarnation", store.Text(), nullable=True),
        sa.Column("state", store.Text(), nullable=True),
        sa.Column("slots", sa.BigInteger(), nullable=True),
        sa.Column("accelerator", store.Text(), nullable=True),
        sa.Column("address", store.Text(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("slot_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("labels", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("software", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("joined_at", sa.Double(), nullable=True),
        sa.Column("changed_at", sa.Double(), nullable=True),
        sa.Column("reason", store.Text(), nullable=True),
        sa.Column("machine_digest", store.Text(), nullable=True),
        sa.Column("past_incarnations", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("drain_decision", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("node_id"),
        if_not_exists=True,
    )
    op.create_table(
        "points",
        sa.Column("run_id", store.Text(), nullable=False),
        sa.Column("kind", store.Text(), nullable=False),
        sa.Column("name", store.Text(), nullable=False),
        sa.Column("node_id", store.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Double(), nullable=True),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "kind", "name", "node_id", "step"),
        if_not_exists=True,
    )
    op.create_index("ix_points_time", "points", ["time"], if_not_exists=True)
    op.create_table(
        "progress",
        sa.Column("run_id", store.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("total_steps", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=True),
        sa.Column("samples_consumed", sa.BigInteger(), nullable=True),
        sa.Column("latest", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reported_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("run_id"),
        if_not_exists=True,
    )
    op.create_table(
        "projections",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("stream_created", sa.Double(), nullable=False),
        sa.Column("commits", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
        if_not_exists=True,
    )
    op.create_table(
        "registered_models",
        sa.Column("name", store.Text(), nullable=False),
        sa.Column("gates", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("configuration", sa.BigInteger(), nullable=True),
        sa.Column("aliases", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("served_version", sa.BigInteger(), nullable=True),
        sa.Column("serving_problem", store.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
        if_not_exists=True,
    )
    op.create_table(
        "run_counts",
        sa.Column("column", store.Text(), nullable=False),
        sa.Column("value", store.Text(), nullable=False),
        sa.Column("runs", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("column", "value"),
        if_not_exists=True,
    )
    op.create_index("ix_run_counts_column_runs", "run_counts", ["column", "runs"], if_not_exists=True)
    op.create_table(
        "runs",
        sa.Column("run_id", store.Text(), nullable=False),
        sa.Column("state", store.Text(), nullable=True),
        sa.Column("name", store.Text(), nullable=True),
        sa.Column("kind", store.Text(), nullable=True),
        sa.Column("experiment", store.Text(), nullable=True),
        sa.Column("user", store.Text(), nullable=True),
        sa.Column("team", store.Text(), nullable=True),
        sa.Column("priority", sa.BigInteger(), nullable=True),
        sa.Column("model", store.Text(), nullable=True),
        sa.Column("parent_run_id", store.Text(), nullable=True),
        sa.Column("evaluates", store.Text(), nullable=True),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("request_hash", store.Text(), nullable=True),
        sa.Column("requested_at", sa.Double(), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.Column("next_generation", sa.BigInteger(), nullable=True),
        sa.Column("unfinished", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("failures", sa.BigInteger(), nullable=True),
        sa.Column("slots_min", sa.BigInteger(), nullable=True),
        sa.Column("slots_max", sa.BigInteger(), nullable=True),
        sa.Column("slots_got", sa.BigInteger(), nullable=True),
        sa.Column("slots_wanted", sa.BigInteger(), nullable=True),
        sa.Column("members", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("placements", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("sizes", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("starts", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("exactness", store.Text(), nullable=True),
        sa.Column("exactness_reason", store.Text(), nullable=True),
        sa.Column("inexact_since", sa.BigInteger(), nullable=True),
        sa.Column("reason", store.Text(), nullable=True),
        sa.Column("problems", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("waiting_code", store.Text(), nullable=True),
        sa.Column("waiting_message", store.Text(), nullable=True),
        sa.Column("waiting_since", sa.Double(), nullable=True),
        sa.Column("dataset_id", store.Text(), nullable=True),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("checkpoint", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("mlflow_run_id", store.Text(), nullable=True),
        sa.Column("mlflow_experiment_id", store.Text(), nullable=True),
        sa.Column("verdict", store.Text(), nullable=True),
        sa.Column("verdict_reason", store.Text(), nullable=True),
        sa.Column("model_version", sa.BigInteger(), nullable=True),
        sa.Column("evaluation", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("log_tail", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("artifacts", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reached_step", sa.BigInteger(), nullable=True),
        sa.Column("reached_samples", sa.BigInteger(), nullable=True),
        sa.Column("sequence", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("run_id"),
        if_not_exists=True,
    )
    op.create_index("ix_runs_dataset_id_requested_at", "runs", ["dataset_id", "requested_at"], if_not_exists=True)
    op.create_index("ix_runs_evaluates_requested_at", "runs", ["evaluates", "requested_at"], if_not_exists=True)
    op.create_index(
        "ix_runs_model_requested_at_run_id", "runs", ["model", "requested_at", "run_id"], if_not_exists=True
    )
    op.create_index("ix_runs_name_requested_at_run_id", "runs", ["name", "requested_at", "run_id"], if_not_exists=True)
    op.create_index("ix_runs_requested_at_run_id", "runs", ["requested_at", "run_id"], if_not_exists=True)
    op.create_index(
        "ix_runs_state_requested_at_run_id", "runs", ["state", "requested_at", "run_id"], if_not_exists=True
    )
    op.create_index("ix_runs_team_requested_at_run_id", "runs", ["team", "requested_at", "run_id"], if_not_exists=True)
    op.create_index("ix_runs_user_requested_at_run_id", "runs", ["user", "requested_at", "run_id"], if_not_exists=True)
    op.create_index("ix_runs_verdict", "runs", ["verdict"], if_not_exists=True)
    op.create_table(
        "studies",
        sa.Column("study_id", store.Text(), nullable=False),
        sa.Column("name", store.Text(), nullable=True),
        sa.Column("state", store.Text(), nullable=True),
        sa.Column("requested_at", sa.Double(), nullable=True),
        sa.Column("reason", store.Text(), nullable=True),
        sa.Column("best", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("study_id"),
        if_not_exists=True,
    )
    op.create_index("ix_studies_requested_at_study_id", "studies", ["requested_at", "study_id"], if_not_exists=True)
    op.create_table(
        "training_datasets",
        sa.Column("dataset_id", store.Text(), nullable=False),
        sa.Column("feature_store_version", store.Text(), nullable=True),
        sa.Column("split_config_hash", store.Text(), nullable=True),
        sa.Column("s3_path", store.Text(), nullable=True),
        sa.Column("row_count", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=True),
        sa.Column("split_counts", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("shard_count", sa.BigInteger(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("classes", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("manifest_uri", store.Text(), nullable=True),
        sa.Column("source", store.Text(), nullable=True),
        sa.Column("format", store.Text(), nullable=True),
        sa.Column("quarantined", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("fingerprint", store.Text(), nullable=True),
        sa.Column("shard_bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("dataset_id"),
        if_not_exists=True,
    )
    op.create_index(
        "ix_training_datasets_created_at_dataset_id",
        "training_datasets",
        ["created_at", "dataset_id"],
        if_not_exists=True,
    )
    op.create_index("ix_training_datasets_fingerprint", "training_datasets", ["fingerprint"], if_not_exists=True)
