"""Facts about studies (searches over hyper-parameters), on ``study.<study_id>.<fact>``."""

from __future__ import annotations

from contracts.base import Fact, Token


class StudyFact(Fact, aggregate="study", id_field="study_id"):
    study_id: Token


class StudyRejected(StudyFact, fact="rejected"):
    """The study will not run; ``reason`` says what to do instead."""

    name: str | None = None
    reason: str
