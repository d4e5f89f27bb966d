"""The files of one generation on this node. What must survive the agent is written before it is acted on."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from contracts.events.run import RunPlaced
from services.worker.local_files import write_atomically
from services.worker.ranks.control_socket import socket_path

#: What is uploaded, or can be fetched again.
REFETCHABLE = ("code", "resume", "init", "checkpoints", "dataset")


class PlacementRecord(BaseModel):
    """``placement.json``: the fact, its place in the stream, and the envelope fields that its reports repeat."""

    model_config = ConfigDict(frozen=True)

    placed: RunPlaced
    sequence: int
    correlation_id: str = ""
    causation_id: str = ""
    traceparent: str = ""


class GenerationFiles:
    """``<data_dir>/runs/<run_id>/g<generation>/``.

    ``placement.json`` holds the placement, ``launch.json`` the ranks' input, ``processes.json`` the processes,
    ``follow.json`` how far their files are read, ``stop.json`` the request to stop, ``report.json`` how they ended.
    ``done.json`` exists once the report is published.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_folder = folder.parent
        self.placement = folder / "placement.json"
        self.launch = folder / "launch.json"
        self.report = folder / "report.json"
        self.done = folder / "done.json"

    @property
    def is_launched(self) -> bool:
        """Whether ranks may have been started."""
        return self.launch.exists()

    @property
    def is_untouched(self) -> bool:
        """Whether no agent has worked on the generation yet."""
        return not self.launch.exists() and not self.report.exists()

    @property
    def is_done(self) -> bool:
        """Whether the generation is reported or dropped."""
        return self.done.exists()

    @property
    def socket(self) -> Path:
        """Path of the control socket, which all generations of a run share."""
        return socket_path(self.run_folder, "agent.sock")

    def write_placement(self, record: PlacementRecord) -> None:
        """Make the placement durable."""
        if not self.placement.exists():
            write_atomically(self.placement, record.model_dump_json())

    def remove_refetchable(self) -> None:
        """Remove what is uploaded or can be fetched again; journals, logs and reports stay."""
        for name in REFETCHABLE:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for ring in self.folder.glob("*.ring"):
            ring.unlink(missing_ok=True)
