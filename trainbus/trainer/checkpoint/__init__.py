"""Checkpoints: safetensors for tensors, JSON for the rest, readable without trainbus. See ``docs/checkpoints.md``."""

from trainbus.trainer.checkpoint.digest import compare, tensor_digest
from trainbus.trainer.checkpoint.files import CheckpointError, Progress, check_safe
from trainbus.trainer.checkpoint.reader import LoadedCheckpoint, load, open_tensors
from trainbus.trainer.checkpoint.schedule import CheckpointSchedule, FailureHistory
from trainbus.trainer.checkpoint.weights import find_initial_weights, find_weights, load_model

__all__ = [
    "CheckpointError",
    "CheckpointSchedule",
    "FailureHistory",
    "LoadedCheckpoint",
    "Progress",
    "check_safe",
    "compare",
    "find_initial_weights",
    "find_weights",
    "load",
    "load_model",
    "open_tensors",
    "tensor_digest",
]
