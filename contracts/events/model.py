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


class ModelDeployed(ModelFact, fact="deployed", occurrence="version"):
    """This version answers requests from now on, in place of ``replaced_version``."""

    version: int = Field(ge=1)
    run_id: Token
    #: None: nothing was served before it.
    replaced_version: int | None = None
    #: From the promotion to the first answer to a user.
    seconds: float
    #: Samples of the evaluation that it answered as it did there, before it answered a user.
    golden_samples: int = 0


class ModelDeployFailed(ModelFact, fact="deploy_failed", occurrence="version"):
    """This version does not answer requests, or does no longer; the one before goes on."""

    version: int = Field(ge=1)
    run_id: Token
    #: Where it failed: fetch, start, warm-up, golden, canary, or watch after it answered users.
    stage: str
    reason: str
    #: The version that answers; None: none does.
    serving_version: int | None = None
