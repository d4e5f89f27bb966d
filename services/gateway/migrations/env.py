"""What Alembic runs: the revisions, on the connection that it is given."""

from alembic import context

from services.gateway.migrations import VERSION_TABLE
from services.gateway.store import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
