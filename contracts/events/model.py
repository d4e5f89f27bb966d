"""Facts about registered models, on ``model.<name>.<fact>``."""

from __future__ import annotations

from pydantic import Field

from contracts.base import Fact, ObjectUri, Sha256, Token
from contracts.lenient import Lenient
from contracts.spec.gates import ModelGates


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
    #: SHA-256 of what the model needs beside its weights (``Task.artifacts``), by name.
    artifacts: dict[str, Sha256] = Field(default_factory=dict)
    reason: str = ""
    #: Set when an older champion was brought back.
    rollback: bool = False


class ModelDeployed(ModelFact, fact="deployed", occurrence="version/instance"):
    """This version answers requests from now on, in place of ``replaced_version``, on one instance of serving."""

    version: int = Field(ge=1)
    run_id: Token
    #: None: nothing was served before it.
    replaced_version: int | None = None
    #: From the promotion to the first answer to a user.
    seconds: float
    #: Samples of the evaluation that it answered as it did there, before it answered a user.
    golden_samples: int = 0
    #: '': an earlier version of serving, which did not tell its instances apart.
    instance: str = ""


class ModelDeployFailed(ModelFact, fact="deploy_failed", occurrence="version/instance"):
    """This version does not answer requests of one instance, or does no longer; the one before goes on."""

    version: int = Field(ge=1)
    run_id: Token
    #: Where it failed: fetch, environment, start, warm-up, golden, canary, or watch after it answered users.
    stage: str
    reason: str
    #: The version that answers; None: none does.
    serving_version: int | None = None
    #: Other instances judge for themselves; '': an earlier version of serving, whose judgement is that of all.
    instance: str = ""


class ModelDeployDelayed(ModelFact, fact="deploy_delayed", occurrence="version/instance/attempt"):
    """An instance cannot serve this version yet, for a reason of its host's; it tries again. Published once a cause."""

    version: int = Field(ge=1)
    run_id: Token
    instance: str
    #: Attempts so far.
    attempt: int
    #: As of ``deploy_failed``; host where that is not known.
    stage: str
    reason: str
    retry_in_s: float


class ModelConfigured(ModelFact, fact="configured", occurrence="version"):
    """These gates hold for the model from now on. Versions of the configuration count up by one."""

    version: int = Field(ge=1)
    gates: Lenient[ModelGates]
    reason: str = ""
    user: str | None = None


class ModelApproved(ModelFact, fact="approved", occurrence="run_id"):
    """A person approved the promotion of this run, or declined it. The first answer stands."""

    run_id: Token
    approved: bool = True
    reason: str = ""
    user: str | None = None


class ModelStaged(ModelFact, fact="staged", occurrence="request_id"):
    """This alias names this version of the model from now on; no version: the alias is removed."""

    alias: str
    version: int | None = None
    #: Of the version.
    run_id: str | None = None
    checkpoint_uri: ObjectUri | None = None
    request_id: str
    reason: str = ""
    user: str | None = None
