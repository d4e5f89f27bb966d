"""Checkpoints: safetensors for tensors, JSON for the rest, readable without trainbus. See ``docs/checkpoints.md``."""

from trainbus.trainer.checkpoint.digest import compare, tensor_digest
from trainbus.trainer.checkpoint.files import CheckpointError, Progress, check_safe
from trainbus.trainer.checkpoint.initial import init_model
from trainbus.trainer.checkpoint.load import Loaded, load, load_model, load_tensors
from trainbus.trainer.checkpoint.staging import Staging
from trainbus.trainer.checkpoint.when import History, When
from trainbus.trainer.checkpoint.writer import Content, Replaced, Writer, write

__all__ = [
    "CheckpointError",
    "Content",
    "History",
    "Loaded",
    "Progress",
    "Replaced",
    "Staging",
    "When",
    "Writer",
    "check_safe",
    "compare",
    "init_model",
    "load",
    "load_model",
    "load_tensors",
    "tensor_digest",
    "write",
]
