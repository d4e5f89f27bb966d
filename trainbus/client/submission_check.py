"""The check of a submission before anything is uploaded: what would fail on a node fails here, within seconds.

The packed project is unpacked into a folder of its own, so that a file that is left out of the package is missed here,
too. A Task is imported in a child process, its params are bound, and one sample of a local folder is decoded.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from contracts.events.train import TrainRequested
from contracts.spec.data import DataSource
from trainbus.client.data_format import check_local_format, read_sample
from trainbus.client.errors import UsageError
from trainbus.client.package import CodePackage

#: Seconds for the import of a Task and its sample. Importing torch alone takes one to four.
CHECK_TIMEOUT_S = 30.0
SKIP_HINT = "nothing was uploaded; --no-check submits it nevertheless"
#: Where ``trainbus`` and ``contracts`` are imported from.
PYTHON_ROOT = Path(__file__).resolve().parents[2]


async def check_submission(request: TrainRequested, package: CodePackage | None, objectives: Sequence[str] = ()) -> str:
    """Check what a request would run; return what could not be checked here, '' if all was.

    ``objectives``: metrics that its training must report besides those that it names.

    Raises:
        UsageError: no attempt could succeed.
    """
    if request.kind != "train":
        return ""
    if request.task is not None and request.data is None:
        raise UsageError(
            "a task needs data: give --data (a folder, s3://bucket/prefix, or the id of a dataset); " + SKIP_HINT
        )
    if isinstance(request.data, DataSource):
        try:
            await asyncio.to_thread(check_local_format, request.data.source, request.data.format)
        except UsageError as error:
            raise UsageError(f"{error}; {SKIP_HINT}") from None
    if package is None:
        return ""
    if request.command is not None:
        _check_command(request.command, package)
        return ""
    sample = await asyncio.to_thread(_read_sample, request.data)
    with tempfile.TemporaryDirectory(prefix="trainbus-check-") as temporary:
        code = Path(temporary).resolve() / "code"
        _unpack(package, code)
        encoded = None if sample is None else {name: base64.b64encode(each).decode() for name, each in sample.items()}
        given: dict[str, object] = {
            "folder": str(code),
            "task": request.task,
            "params": request.params,
            "sample": encoded,
        }
        given["trained"] = [*_retention_metric(request), *objectives]
        given["measured"] = _evaluation_metric(request)
        return await _check_task(request, code, Path(temporary) / "answer.json", given)


def _retention_metric(request: TrainRequested) -> list[str]:
    return [request.retention.metric] if "metric" in request.retention.model_fields_set else []


def _evaluation_metric(request: TrainRequested) -> list[str]:
    return [] if request.evaluation is None else [request.evaluation.metric]


async def _check_task(request: TrainRequested, code: Path, answer: Path, given: Mapping[str, object]) -> str:
    path = os.pathsep.join(filter(None, (str(PYTHON_ROOT), os.environ.get("PYTHONPATH"))))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainbus.ranks.task_check", str(answer)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=code,
        env={**os.environ, **request.env, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            _, errors = await child.communicate(json.dumps(given).encode())
    except TimeoutError:
        return f"the import of {request.task} takes longer than {CHECK_TIMEOUT_S:g} s, so it was not checked"
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if not answer.exists():
        last = (errors.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return f"the check of {request.task} ended by itself ({last}), so it was not checked"
    found = json.loads(answer.read_text())
    if problem := found.get("problem"):
        raise UsageError(f"{problem}; {SKIP_HINT}")
    return str(found.get("skipped", ""))


def _unpack(package: CodePackage, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(package.body), mode="r:gz") as tar:
        tar.extractall(folder, filter="data")


def _read_sample(data: object) -> Mapping[str, bytes] | None:
    """Return a sample of data that lies on this machine; None if it does not, or has none that can be read here."""
    if not isinstance(data, DataSource) or not data.source.startswith("file:"):
        return None
    return read_sample(Path(unquote(urlsplit(data.source).path)), data)


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
