"""Commits checkpoints; ``gc`` removes unneeded blobs and manifests."""

from services.checkpoint.app import build
from services.checkpoint.garbage_collection import GARBAGE
from services.checkpoint.settings import CheckpointSettings
from services.kit import garbage_collector

garbage_collector.main("checkpoint", build, CheckpointSettings(), GARBAGE)
