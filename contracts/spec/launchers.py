"""Programs that start a script once for each slot, as trainbus itself does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

#: Launchers by the name of their program, and by the module that ``python -m`` runs.
PROGRAMS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "composer", "colossalai")
MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
SHELLS = ("sh", "bash")


def find_launcher(command: Sequence[str]) -> str | None:
    """Return the launcher that a command starts; None if it starts none."""
    words = [word for part in command for word in part.split()] if _is_shell(command) else list(command)
    for number, word in enumerate(words):
        name = PurePosixPath(word).name
        if name in PROGRAMS and (name != "accelerate" or words[number + 1 : number + 2] == ["launch"]):
            return "accelerate launch" if name == "accelerate" else name
        if word in MODULES and words[max(number - 1, 0)] == "-m":
            return word
        if name.endswith((".py", ".sh")):
            return None  # what follows are the script's own arguments
    return None


def describe_launcher(command: Sequence[str], max_slots: int) -> str | None:
    """Return what to change in a command that starts a launcher on several slots; None if there is nothing."""
    launcher = find_launcher(command) if max_slots > 1 else None
    if launcher is None:
        return None
    script = next((word for part in command for word in part.split() if word.endswith(".py")), "train.py")
    return (
        f"{launcher} would start every process once more on each of the {max_slots} slots: trainbus starts the command "
        f"once for each slot, with RANK and WORLD_SIZE set. Give the script alone (python {script}), or ask for 1 slot"
    )


def _is_shell(command: Sequence[str]) -> bool:
    return PurePosixPath(command[0]).name in SHELLS if command else False
