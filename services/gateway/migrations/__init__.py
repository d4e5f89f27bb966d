"""The schema of the read model, by Alembic.

A change of a table is a revision in ``versions``, and so is a change of what a column means: that one calls
``clear_rows``, and the rows are folded again from the streams. HEAD names the last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.config import Config

#: The newest revision.
HEAD = "0015"
#: Holds the revision of the tables. MLflow, which may have the same database, calls its own ``alembic_version``.
VERSION_TABLE = "read_model_revision"


def read_revision(connection: sa.Connection) -> str | None:
    """Return the revision of the tables that are there; None: there are none, or they are older than revisions."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608


def is_known(revision: str) -> bool:
    """Whether this version can upgrade from a revision."""
    from alembic.script import ScriptDirectory

    known = ScriptDirectory.from_config(_configure()).walk_revisions()
    return revision in {each.revision for each in known}


def upgrade(connection: sa.Connection) -> None:
    """Bring the tables to HEAD, in the transaction of the connection."""
    from alembic import command

    config = _configure()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def clear_rows(connection: sa.Connection) -> None:
    """Forget how far the streams are read, so that every row is folded again. For revisions."""
    connection.execute(sa.text("DELETE FROM projections"))


def _configure() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    return config
