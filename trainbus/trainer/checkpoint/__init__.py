"""Checkpoints: safetensors for tensors, JSON for the rest, readable without trainbus. See ``docs/checkpoints.md``."""

from trainbus.trainer.checkpoint.digest import compare, tensor_digest
from trainbus.trainer.checkpoint.files import CheckpointError, Progress, check_safe
from trainbus.trainer.checkpoint.initial_weights import load_initial_weights
from trainbus.trainer.checkpoint.reader import LoadedCheckpoint, load, load_model, load_tensors
from trainbus.trainer.checkpoint.schedule import CheckpointSchedule, FailureHistory
from trainbus.trainer.checkpoint.staging import StagingBuffers
from trainbus.trainer.checkpoint.writer import CheckpointWriter, RankFiles, WriteCancelled, write

__all__ = [
    "CheckpointError",
    "CheckpointSchedule",
    "CheckpointWriter",
    "FailureHistory",
    "LoadedCheckpoint",
    "Progress",
    "RankFiles",
    "StagingBuffers",
    "WriteCancelled",
    "check_safe",
    "compare",
    "load",
    "load_initial_weights",
    "load_model",
    "load_tensors",
    "tensor_digest",
    "write",
]
