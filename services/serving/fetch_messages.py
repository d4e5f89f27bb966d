"""What serving and the process that fetches its models send each other: one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from contracts.events.model import ModelPromoted
from services.kit.messages import TransientError
from services.kit.model_folder import ModelFolderError
from services.serving.model_source import FetchedModel

#: Bytes of the longest line.
MAX_LINE_BYTES = 64 * 2**20
Operation = Literal["fetch", "remove_others", "cancel"]


class FetchRequest(BaseModel):
    """``fetch``: the model of ``promotion`` and its golden set. ``remove_others``: the folders of ``model`` but those
    in ``kept``. ``cancel``: the request with this id; it gets no reply.
    """

    model_config = ConfigDict(frozen=True)

    id: int
    op: Operation
    promotion: ModelPromoted | None = None
    model: str = ""
    kept: tuple[Path, ...] = ()


class FetchReply(BaseModel):
    """The reply to the request with this id. ``golden``: the file of the golden set."""

    model_config = ConfigDict(frozen=True)

    id: int
    fetched: FetchedModel | None = None
    golden: Path | None = None
    error: Literal["", "model", "transient", "os", "other"] = ""
    reason: str = ""
    errno: int | None = None

    @classmethod
    def of_error(cls, request_id: int, error: Exception) -> FetchReply:
        """Return the reply to a request that ended with an error."""
        match error:
            case ModelFolderError():
                return cls(id=request_id, error="model", reason=str(error))
            case TransientError():
                return cls(id=request_id, error="transient", reason=str(error))
            case OSError(errno=int() as number):
                return cls(id=request_id, error="os", reason=error.strerror or str(error), errno=number)
            case _:
                return cls(id=request_id, error="other", reason=f"{type(error).__name__}: {error}")

    def check(self) -> None:
        """Raise the error with which the request ended, if it did."""
        match self.error:
            case "model":
                raise ModelFolderError(self.reason)
            case "transient":
                raise TransientError(self.reason)
            case "os":
                raise OSError(self.errno, self.reason)
            case "other":
                raise RuntimeError(self.reason)
