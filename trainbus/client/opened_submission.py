"""What a submission of a run and that of a study begin with: pack the project, build the request, check both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from contracts.events.train import TrainRequested
from trainbus.client.address import StackAddress
from trainbus.client.checkpoints import find_checkpoint
from trainbus.client.connection import Connection
from trainbus.client.package import CodePackage, pack_project
from trainbus.client.submission import build_request, locate_code, upload_package
from trainbus.client.submission_check import CheckOutcome, SubmissionCheck
from trainbus.client.submit_options import SubmitOptions


class OpenedSubmission:
    """A valid request for a run, and its project; nothing of it is sent yet."""

    def __init__(
        self,
        address: StackAddress,
        request: TrainRequested,
        package: CodePackage | None,
        check: SubmissionCheck | None,
    ) -> None:
        self.request, self.package = request, package
        self._address, self._check = address, check

    async def check(self, request: TrainRequested, objectives: Sequence[str] = ()) -> CheckOutcome:
        """Check the project with a request for it, unless the user wants no check.

        ``objectives`` are metrics that the run must report.

        Raises:
            UsageError: the run cannot run.
        """
        return CheckOutcome() if self._check is None else await self._check.run(request, self.package, objectives)

    async def upload(self) -> TrainRequested:
        """Upload the project; return the request that names where it is."""
        request, package = self.request, self.package
        if package is None or request.code is None:
            return request
        uri = await upload_package(self._address, package)
        return request.model_copy(update={"code": request.code.model_copy(update={"uri": uri})})


@asynccontextmanager
async def open_submission(
    connection: Connection,
    address: StackAddress,
    project: Path | str | type | None,
    task: str | None,
    options: SubmitOptions,
) -> AsyncIterator[OpenedSubmission]:
    """Pack a project and build its request; the process that checks a Task starts first, since it imports torch.

    Raises:
        UsageError: the request is not valid.
    """
    folder, task = locate_code(project, task, options)
    if (init_from := options.get("init_from")) is not None:
        options["init_from"] = (await find_checkpoint(connection, init_from)).uri
    is_checked = options.get("check") is not False
    async with SubmissionCheck(imports_task=is_checked and task is not None, address=address) as check:
        package = pack_project(folder) if folder is not None else None
        request = build_request(folder, task, package, options)
        yield OpenedSubmission(address, request, package, check if is_checked else None)
