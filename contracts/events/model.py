"""Facts about registered models, on ``model.<name>.<fact>``."""

from __future__ import annotations

from pydantic import Field

from contracts.base import Fact, ObjectUri, Token


class ModelFact(Fact, aggregate="model", id_field="model"):
    model: Token


class ModelPromoted(ModelFact, fact="promoted", occurrence="version"):
    """This checkpoint is the model's champion from now on. Versions count up by one."""

    version: int = Field(ge=1)
    run_id: Token
    checkpoint_uri: ObjectUri
    dataset_id: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    previous_run_id: str | None = None
    reason: str = ""
    #: Set when an older champion was brought back.
    rollback: bool = False
