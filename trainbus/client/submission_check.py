"""The check of a submission before anything is uploaded: what would fail on a node fails here, within seconds.

The packed project is unpacked into a folder of its own, so that a file that is left out of the package is missed here,
too. A Task is imported in a child process, its params are bound, and one step is tried on a sample of a local folder,
or of a dataset that the gateway has. The process starts before the project is packed, since it begins with the import
of torch.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from contracts.events.train import TrainRequested
from contracts.spec.data import DatasetRef, DataSource
from trainbus.client.address import StackAddress
from trainbus.client.data_format import check_local_format
from trainbus.client.errors import UsageError
from trainbus.client.package import CodePackage
from trainbus.client.sampled_data import SampledData, fetch_stored, read_local

#: Seconds for the import of a Task and one step of it, unless the variable says otherwise. Importing torch alone takes
#: one to four, and ten times as long on a busy machine.
CHECK_TIMEOUT_S = 30.0
CHECK_TIMEOUT_VARIABLE = "TRAINBUS_CHECK_TIMEOUT_S"
SKIP_HINT = "nothing was uploaded; --no-check submits it nevertheless"
#: Where ``trainbus`` and ``contracts`` are imported from.
PYTHON_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What a check found that prevents nothing."""

    #: What could not be checked here, and why; '' if all was.
    unchecked: str = ""
    #: What may be a mistake.
    notes: tuple[str, ...] = ()


class SubmissionCheck:
    """Checks a submission. Use it as an async context manager around the packing.

    Args:
        imports_task: whether a Task is to be imported: torch is, in a process that starts at once.
        address: where the gateway is that has datasets; None: it is not asked.
    """

    def __init__(self, *, imports_task: bool, address: StackAddress | None = None) -> None:
        self._imports_task, self._address = imports_task, address
        self._child: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="trainbus-check-", ignore_cleanup_errors=True)
        if self._imports_task:
            self._child = await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()
        self._folder.cleanup()

    @property
    def _answer(self) -> Path:
        return Path(self._folder.name) / "answer.json"

    async def _start(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, (str(PYTHON_ROOT), os.environ.get("PYTHONPATH"))))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trainbus.ranks.task_check", str(self._answer)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._folder.name,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        )

    async def run(
        self, request: TrainRequested, package: CodePackage | None, objectives: Sequence[str] = ()
    ) -> CheckOutcome:
        """Check what a request would run.

        ``objectives``: metrics that its training must report besides those that it names.

        Raises:
            UsageError: no attempt could succeed.
        """
        if request.kind != "train":
            return CheckOutcome()
        if request.task is not None and request.data is None:
            raise UsageError(
                "a task needs data: give --data (a folder, s3://bucket/prefix, or the id of a dataset); " + SKIP_HINT
            )
        for data in (request.data, *request.datasets.values()):
            if isinstance(data, DataSource):
                try:
                    await asyncio.to_thread(check_local_format, data.source, data.format)
                except UsageError as error:
                    raise UsageError(f"{error}; {SKIP_HINT}") from None
        if package is None:
            return CheckOutcome()
        if request.command is not None:
            _check_command(request.command, package)
            return CheckOutcome()
        code = Path(self._folder.name).resolve() / "code"
        await asyncio.to_thread(_unpack, package, code)
        sampled = await self._read_data(request.data)
        training = request.training
        return await self._check_task(
            {
                "folder": str(code),
                "env": request.env,
                "task": request.task,
                "params": request.params,
                "training": {} if training is None else training.model_dump(include={"precision", "max_steps"}),
                "data": sampled.to_plain(),
                "trained": [*_retention_metric(request), *objectives],
                "measured": _evaluation_metric(request),
            }
        )

    async def _read_data(self, data: DataSource | DatasetRef | None) -> SampledData:
        if isinstance(data, DatasetRef):
            return await fetch_stored(self._address, data.dataset_id)
        return SampledData() if data is None else await asyncio.to_thread(read_local, data)

    async def _check_task(self, given: Mapping[str, object]) -> CheckOutcome:
        child = self._child = self._child or await self._start()
        errors, timeout_s = b"", _timeout_s()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                _, errors = await child.communicate(json.dumps(given).encode())
        if not self._answer.exists():
            task = given["task"]
            if child.returncode is None:
                return CheckOutcome(
                    f"the import of {task} takes longer than {timeout_s:g} s, so it was not checked "
                    f"({CHECK_TIMEOUT_VARIABLE} allows more)"
                )
            last = (errors.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            return CheckOutcome(f"the check of {task} ended by itself ({last}), so it was not checked")
        found = json.loads(self._answer.read_text())
        if problem := found["problem"]:
            raise UsageError(f"{problem}; {SKIP_HINT}")
        return CheckOutcome(found["skipped"], tuple(found["notes"]))


def _timeout_s() -> float:
    text = os.environ.get(CHECK_TIMEOUT_VARIABLE) or str(CHECK_TIMEOUT_S)
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{CHECK_TIMEOUT_VARIABLE} is {text!r}: give a number of seconds") from None


def _retention_metric(request: TrainRequested) -> list[str]:
    return [request.retention.metric] if "metric" in request.retention.model_fields_set else []


def _evaluation_metric(request: TrainRequested) -> list[str]:
    return [] if request.evaluation is None else [request.evaluation.metric]


def _unpack(package: CodePackage, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(package.body), mode="r:gz") as tar:
        tar.extractall(folder, filter="data")


def _check_command(command: Sequence[str], package: CodePackage) -> None:
    """Check that the files of the project that a command names first are there and can run.

    Raises:
        UsageError: one is missing, is not executable, or is no valid Python.
    """
    with tarfile.open(fileobj=io.BytesIO(package.body), mode="r:gz") as tar:
        members = {member.name: member for member in tar.getmembers()}
        program = command[0]
        if program.startswith("./"):
            member = members.get(program.removeprefix("./"))
            if member is None:
                raise _no_file(program)
            if not member.mode & 0o111:
                raise UsageError(f"{program} is not executable: `chmod +x {program}`; {SKIP_HINT}")
        if not Path(program).name.startswith("python") or len(command) < 2 or not command[1].endswith(".py"):
            return
        script = command[1]
        if Path(script).is_absolute():
            return
        member = members.get(os.path.normpath(script))
        if member is None:
            raise _no_file(script)
        content = tar.extractfile(member)
        try:
            compile(content.read() if content else b"", script, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            place = f" ({script}:{error.lineno})" if isinstance(error, SyntaxError) else f" ({script})"
            text = error.msg if isinstance(error, SyntaxError) else str(error)
            raise UsageError(f"{type(error).__name__}: {text}{place}; {SKIP_HINT}") from None


def _no_file(name: str) -> UsageError:
    return UsageError(
        f"there is no file {name} in the project: check the command, and whether .gitignore or .trainbusignore leaves "
        f"it out; {SKIP_HINT}"
    )
