"""The settings of the ingestion service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.kit.settings import Settings


class IngestionSettings(Settings):
    """Settings of the ingestion service."""

    #: Folders of this machine that requests may name as sources (``file:///...``), with all that is in them. None in a
    #: cluster: otherwise every client could read the files of the service's machine.
    source_folders: tuple[Path, ...] = ()
    #: Processes that decode images; None: one for each core, up to eight.
    decoders: int | None = Field(None, ge=1, le=256)
