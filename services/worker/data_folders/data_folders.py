"""The datasets of scripts on this node: folders of plain files, made once from the shards and shared by all runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import structlog

from contracts.datasets import SPLITS
from contracts.events.run import PreparedDataset
from contracts.ranks import INHERITED
from services.kit.bus import TransientError
from services.kit.concurrency import run_in_thread
from services.kit.workdir import Workdir
from services.worker import metrics
from services.worker.cache.cached_trees import CachedTrees, DamagedTreeError, TreeRecord
from services.worker.cache.node_cache import CacheError, CachePins, NodeCache
from services.worker.core.plain_paths import EXIT_INVALID, FILE_TIME_S
from services.worker.launch.executor import PYTHON_ROOT

log = structlog.get_logger(__name__)

#: How much below the agent a process that unpacks is: ranks of other runs and the agent's lease come first.
NICENESS = 10


class DataFolders:
    """Makes datasets into folders of plain files, and lays them out for runs."""

    def __init__(self, cache: NodeCache, trees: CachedTrees, workdir: Workdir) -> None:
        """``workdir`` is on the file system of the trees."""
        self._cache, self._trees, self._workdir = cache, trees, workdir

    def dataset_ids(self) -> tuple[str, ...]:
        """Return the datasets whose files are here."""
        return tuple(self._trees.names())

    async def fetch(self, dataset: PreparedDataset, pins: CachePins) -> TreeRecord:
        """Have a dataset's files on this node until the pins are released; return what they are.

        Raises:
            CacheError: the dataset is not in the store, or is not what it should be.
            TransientError, OSError: the store does not answer, or there is no room.
        """
        name = dataset.dataset_id
        self._cache.files.add_pins([self._trees.path(name)], pins.files)
        async with self._cache.files.lock(self._trees.path(name)):
            if (record := await run_in_thread(self._trees.use, name)) is not None:
                metrics.CACHE_LOOKUPS.labels("hit").inc()
                return record
            metrics.CACHE_LOOKUPS.labels("miss").inc()
            record = await self._make_tree(dataset)
        await run_in_thread(self._cache.evict)
        return record

    async def lay_out(self, dataset: PreparedDataset, folder: Path, pins: CachePins) -> None:
        """Make ``folder`` one with the dataset's files, which ``fetch`` has fetched; errors as there."""
        for is_last in (False, True):
            try:
                return await run_in_thread(self._link, dataset.dataset_id, folder)
            except DamagedTreeError as error:
                log.error("a cached data folder is damaged, making it again", id=dataset.dataset_id, error=str(error))
                await run_in_thread(self._trees.remove, dataset.dataset_id)
                if is_last:
                    raise TransientError(f"the files of dataset {dataset.dataset_id} change: {error}") from error
                await self.fetch(dataset, pins)

    def _link(self, name: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        record = self._trees.use(name)
        if record is None:
            raise DamagedTreeError("it is gone")
        self._trees.link(name, record, folder)

    async def _make_tree(self, dataset: PreparedDataset) -> TreeRecord:
        with self._workdir.temporary(f"{dataset.dataset_id[:12]}-") as work:
            source, target = Path(work) / "dataset", Path(work) / "files"
            target.mkdir()
            # The shards are pinned while they are unpacked, and no longer.
            async with self._cache.pin_files() as pins:
                await self._cache.dataset(dataset.manifest_uri, dataset.dataset_id, source, pins, whole=SPLITS)
                record = await _unpack(source, target)
            await run_in_thread(self._trees.add, dataset.dataset_id, target, record)
        return record


async def _unpack(source: Path, target: Path) -> TreeRecord:
    """Unpack the shards in another process, which is killed if this call is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.worker.data_folders.unpack", str(source), str(target), str(NICENESS)),
        env={name: os.environ[name] for name in INHERITED if name in os.environ} | {"PYTHONPATH": str(PYTHON_ROOT)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode == EXIT_INVALID:
        raise CacheError(f"the dataset cannot be unpacked for a script: {reason}. Ingest it again")
    if process.returncode:
        ended = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit {process.returncode}"
        raise TransientError(f"the dataset could not be unpacked on this node ({ended}): {reason}")
    return TreeRecord(**json.loads(output), file_time_s=FILE_TIME_S)
