"""Datasets over HTTP: their manifest, index and shards from the object store, and what is verified beside it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse

from contracts import subjects
from contracts.base import TOKEN_PATTERN, ingestion_id_for
from contracts.datasets import Manifest, dataset_uri, ingestion_uri, link_name, shard_uri
from contracts.events.dataset import DatasetIngested
from contracts.events.train import IngestRequested
from contracts.verification import DatasetVerification
from services.gateway import queries, views
from services.gateway.bodies import body_of, read_body, read_json_body
from services.gateway.commands import BusUnavailable, Commands
from services.gateway.dataset_verification import verify_datasets
from services.gateway.files import Range, RunFiles, guard, respond, tag
from services.gateway.long_answer import Advance, LongAnswers
from services.gateway.parameters import Key, Limit
from services.gateway.projection import Projection
from services.gateway.settings import GatewaySettings
from services.gateway.sources import compare_sources
from services.gateway.stored_dataset import StoredDataset, find_dataset
from services.kit.bus import Bus
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri

REMEDY = "`trainbus datasets verify --repair` makes it again"
#: Seconds for which the fact of an ingestion is waited for.
READ_TIMEOUT_S = 20.0

Reference = Annotated[
    str, PathParameter(description="the id of a dataset, its beginning, an ingestion's, a run's, or a run's name")
]


def dataset_routes(
    projection: Projection,
    files: RunFiles,
    settings: GatewaySettings,
    commands: Commands,
    bus: Bus,
    answers: LongAnswers,
) -> APIRouter:
    """Return the routes of what a dataset consists of. Nothing is read but what its manifest names."""
    router = APIRouter()

    async def find(reference: str) -> StoredDataset:
        return await find_dataset(projection, settings.bucket_datasets, reference)

    async def find_ingested(ingestion_id: str) -> DatasetIngested | None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                fact = await bus.get_last_message(subjects.fact("dataset", ingestion_id, DatasetIngested.fact))
        except TimeoutError as error:
            raise BusUnavailable("NATS does not answer: ask again") from error
        return fact.event if fact is not None else None

    def scratch_dir() -> Path:
        folder = settings.data_dir / "verified"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    async def read_manifest(reference: str) -> tuple[StoredDataset, bytes, Manifest]:
        found = await find(reference)
        content = await guard(files.get(found.manifest_uri), REMEDY)
        try:
            return found, content, found.read(content)
        except ValueError as error:
            raise HTTPException(502, f"{found.manifest_uri} {error}: {REMEDY}") from error

    @router.get("/datasets/{dataset}", response_model=views.DatasetDetail)
    async def get_dataset(dataset: Reference) -> views.DatasetDetail:
        """A dataset, the ingestions that it was made from, the runs that used it, and the models that they became."""
        await projection.catch_up()  # who has just used it finds that here
        found = await find(dataset)
        return await queries.dataset_detail(projection.store, found.dataset_id, found.manifest_uri, found.row)

    @router.get("/datasets/{dataset}/manifest", response_class=Response)
    async def get_dataset_manifest(dataset: Reference) -> Response:
        """The manifest, to the byte: its SHA-256 is the dataset's id, `Content-Location` its address."""
        found, content, _ = await read_manifest(dataset)
        headers = {**tag(found.dataset_id), "Content-Location": found.manifest_uri}
        return Response(content, media_type="application/json", headers=headers)

    @router.get("/datasets/{dataset}/index", response_class=Response)
    async def get_dataset_index(dataset: Reference, wanted: Range = None) -> Response:
        """The list of its records, sorted by key: a line of JSON each."""
        found, _, manifest = await read_manifest(dataset)
        uri = ingestion_uri(found.bucket, manifest.fingerprint, "index.jsonl")
        info = await guard((await files.open()).head(uri), _describe_loss(manifest))

        def read(start: int, stop: int) -> AsyncIterator[bytes]:
            return files.read_object(uri, start, stop)

        return await respond(read, info.size_bytes, info.etag, wanted)

    @router.get("/datasets/{dataset}/files/{path:path}", response_class=Response)
    async def get_dataset_file(dataset: Reference, path: str, wanted: Range = None) -> Response:
        """A shard, or the index of one, by its path in the manifest."""
        found, _, manifest = await read_manifest(dataset)
        shards = [shard for split in manifest.splits.values() for shard in split.shards]
        named = {shard.path: (shard.sha256, shard.size_bytes) for shard in shards}
        named |= {shard.index_path: (shard.index_sha256, shard.index_bytes) for shard in shards}
        if path not in named:
            raise HTTPException(404, f"dataset {found.dataset_id} has no file {path!r}: see its manifest")
        sha256, size_bytes = named[path]

        def read(start: int, stop: int) -> AsyncIterator[bytes]:
            return files.read_object(shard_uri(found.bucket, sha256), start, stop)

        return await respond(read, size_bytes, sha256, wanted, REMEDY)

    @router.post(
        "/datasets/verify", response_class=StreamingResponse, openapi_extra=body_of(views.DatasetChoice, required=False)
    )
    async def verify_several(request: Request) -> StreamingResponse:
        """Read datasets back and compare every hash: server-sent events `progress`, then `result` or `problem`.

        `result` has what was read and, by dataset, the damaged files.
        """
        names = (await read_body(views.DatasetChoice, request)).datasets
        if not names:
            await projection.catch_up()
            names = await queries.list_dataset_ids(projection.store)
        chosen = [await find(each) for each in names]

        async def verify(advance: Advance) -> DatasetVerification:
            return await verify_datasets(await files.open(), chosen, scratch_dir(), advance)

        return answers.respond(verify, "verify")

    @router.post("/datasets/{dataset}/sources/verify", response_class=StreamingResponse)
    async def verify_sources(dataset: Reference) -> StreamingResponse:
        """Compare the versions of the objects that it was made of with those of now, by the store's own hash of each.

        Server-sent events, as of a verification; `result` names objects that are gone or have changed.
        """
        found, _, manifest = await read_manifest(dataset)

        async def verify(advance: Advance) -> views.SourceVerification:
            with tempfile.TemporaryDirectory(prefix="sources.", dir=scratch_dir()) as folder:
                index, objects = Path(folder) / "index.jsonl", await files.open()
                uri = ingestion_uri(found.bucket, manifest.fingerprint, "index.jsonl")
                try:
                    await objects.download(uri, index)
                except ObjectNotFound as error:
                    raise HTTPException(
                        404, f"{error} is not in the object store: {_describe_loss(manifest)}"
                    ) from error
                return await compare_sources(objects, manifest.source, index)

        return answers.respond(verify, "verify")

    @router.post(
        "/datasets/{dataset}/repair", response_class=StreamingResponse, openapi_extra=body_of(views.DatasetRepair)
    )
    async def repair_dataset(dataset: Reference, request: Request) -> StreamingResponse:
        """Delete what is damaged, and ask for the ingestion that makes it again.

        Server-sent events, as of a verification; `result` names what was deleted and the ingestion. What is intact
        stays: files are read again before they go.
        """
        repair = await read_body(views.DatasetRepair, request)
        found, ingested = await find(dataset), await find_ingested(repair.ingestion_id)
        if ingested is None or found.row is None or found.row["feature_store_version"] != ingested.fingerprint:
            raise HTTPException(
                422,
                f"ingestion_id: {repair.ingestion_id} is no ingestion that dataset {found.dataset_id} was made from; "
                "`trainbus datasets lineage` lists those",
            )
        # Without this link sharding checks every shard instead of trusting that it exists.
        link = _link_uri(ingested)

        async def delete(advance: Advance) -> views.RepairedDataset:
            objects = await files.open()
            checked = await verify_datasets(objects, [found], scratch_dir(), advance, repair.files)
            damaged = [each.uri for each in checked.damaged.get(found.dataset_id, [])]
            for uri in [link, *damaged]:
                await objects.delete(uri)
            envelope = commands.envelope(IngestRequested, "")
            await commands.store(IngestRequested(data=ingested.data), envelope)
            ingestion_id = ingestion_id_for(envelope.source, envelope.id)
            return views.RepairedDataset(deleted=damaged, ingestion_id=ingestion_id)

        return answers.respond(delete, "verify")

    @router.post(
        "/ingestions",
        status_code=202,
        response_model=views.AcceptedIngestionRequest,
        openapi_extra=body_of(IngestRequested),
    )
    async def post_ingestion(request: Request, response: Response, key: Key = None) -> views.AcceptedIngestionRequest:
        """Ask for a dataset to be made without training on it."""
        ingest, envelope = commands.parse(IngestRequested, await read_json_body(request), key or "")
        ingestion_id = ingestion_id_for(envelope.source, envelope.id)
        response.headers["Location"] = f"/ingestions/{ingestion_id}"
        return await commands.publish(views.AcceptedIngestionRequest, ingest, envelope, ingestion_id=ingestion_id)

    @router.get("/ingestions", response_model=views.Ingestions)
    async def get_ingestions(
        without_dataset: Annotated[
            bool, Query(description="only those that have failed, or whose dataset is not made yet")
        ] = False,
        limit: Limit = 100,
        cursor: str | None = None,
    ) -> views.Ingestions:
        """Ingestions and what they found, newest first."""
        await projection.catch_up()
        return await queries.list_ingestions(
            projection.store, without_dataset=without_dataset, limit=limit, cursor=cursor
        )

    @router.get("/ingestions/{ingestion}", response_model=views.IngestionView)
    async def get_ingestion(
        ingestion: Annotated[str, PathParameter(pattern=TOKEN_PATTERN)],
    ) -> views.IngestionView:
        """An ingestion that has read its source, and its dataset once all of that is in the store."""
        ingested = await find_ingested(ingestion)
        if ingested is None:
            raise HTTPException(404, f"ingestion {ingestion} is not known, still reads its source, or has failed")
        dataset_id = await guard(_find_made(await files.open(), ingested))
        return views.IngestionView(ingestion_id=ingestion, fingerprint=ingested.fingerprint, dataset_id=dataset_id)

    return router


def _link_uri(ingested: DatasetIngested) -> str:
    name = link_name(ingested.fingerprint, ingested.data.shard_bytes)
    return f"{ingested.index_uri.rpartition('/')[0]}/{name}"


async def _find_made(objects: ObjectStore, ingested: DatasetIngested) -> str | None:
    """Return the id of the dataset that was made from an ingestion, None while some of it is not in the store."""
    try:
        dataset_id = str(json.loads(await objects.get(_link_uri(ingested)))["dataset_id"])
        is_there = await objects.exists(dataset_uri(split_uri(ingested.index_uri)[0], dataset_id))
    except (ObjectNotFound, ValueError, KeyError, TypeError):
        return None
    return dataset_id if is_there else None


def _describe_loss(manifest: Manifest) -> str:
    return f"the records cannot be listed: ingest {manifest.source} again"
