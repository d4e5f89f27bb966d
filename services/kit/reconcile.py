"""Makes the server's streams, consumers and buckets match ``contracts.topology``.

It creates what is missing and changes only what differs. It never shrinks a limit, never removes a
subject and never deletes, because an operator may have raised what the topology started with.
"""

from __future__ import annotations

import time
from dataclasses import replace

import structlog
from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NotFoundError

from contracts.topology import Bucket, Consumer, ObjectBucket, Stream, Topology

log = structlog.get_logger(__name__)
UNLIMITED = -1


async def reconcile(js: JetStreamContext, topology: Topology, *, replicas: int = 1) -> list[str]:
    """Reconcile the server with the topology; return the changes, one line each. Safe to run concurrently."""
    changes: list[str] = []
    for stream in topology.streams:
        changes += await _stream(js, stream, replicas)
    for bucket in topology.buckets:
        changes += await _bucket(js, bucket, replicas)
    for objects in topology.object_buckets:
        changes += await _object_bucket(js, objects, replicas)
    for consumer in topology.consumers:
        changes += await _consumer(js, consumer)
    for change in changes:
        log.info("reconciled", change=change)
    return changes


async def _stream(js: JetStreamContext, want: Stream, replicas: int) -> list[str]:
    try:
        have = (await js.stream_info(want.name)).config
    except NotFoundError:
        try:
            await js.add_stream(_stream_config(want, replicas))
            return [f"created stream {want.name}"]
        except BadRequestError:
            # Another service created it at the same moment, with another first sequence.
            have = (await js.stream_info(want.name)).config
    changed = _merge_config(have, want, replicas)
    if changed == have:
        return []
    await js.update_stream(changed)
    return [f"updated stream {want.name}"]


def _stream_config(want: Stream, replicas: int) -> api.StreamConfig:
    return api.StreamConfig(
        name=want.name,
        description=want.doc,
        subjects=list(want.subjects),
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        num_replicas=replicas,
        max_bytes=want.max_bytes or UNLIMITED,
        max_age=want.max_age_s or 0,
        max_msgs_per_subject=want.max_messages_per_subject or UNLIMITED,
        duplicate_window=want.duplicate_window_s,
        compression=api.StoreCompression.S2 if want.compress else api.StoreCompression.NONE,
        allow_direct=True,
        allow_atomic=want.atomic,
        # Milliseconds since the epoch: more than there have been messages in a stream of this name before.
        first_seq=time.time_ns() // 1_000_000 if want.names_messages else None,
    )


def _merge_config(have: api.StreamConfig, want: Stream, replicas: int) -> api.StreamConfig:
    """Return ``have`` with all that ``want`` requires; a limit only rises."""
    subjects = list(have.subjects or [])
    return replace(
        have,
        subjects=subjects + [subject for subject in want.subjects if subject not in subjects],
        num_replicas=max(have.num_replicas or 1, replicas),
        max_bytes=_higher_limit(have.max_bytes, want.max_bytes),
        max_age=_higher_age(have.max_age, want.max_age_s),
        max_msgs_per_subject=_higher_limit(have.max_msgs_per_subject, want.max_messages_per_subject),
        allow_atomic=want.atomic or have.allow_atomic,
    )


def _higher_limit(have: int | None, want: int | None) -> int:
    if have is None or have <= 0 or want is None:
        # One of the two is unlimited. An operator's limit on what we leave unlimited stays.
        return have if have is not None and have > 0 else UNLIMITED
    return max(have, want)


def _higher_age(have: float | None, want: float | None) -> float:
    if not have or want is None:
        return have or 0
    return max(have, want)


async def _consumer(js: JetStreamContext, want: Consumer) -> list[str]:
    try:
        have = (await js.consumer_info(want.stream, want.name)).config
    except NotFoundError:
        try:
            await js.add_consumer(want.stream, _consumer_config(want))
        except BadRequestError as error:
            # Another service created it at the same moment.
            if "already exists" not in str(error):
                raise
        return [f"created consumer {want.stream}/{want.name}"]
    filters = have.filter_subjects or ([have.filter_subject] if have.filter_subject else [])
    if set(filters) == set(want.filters) and have.max_deliver == UNLIMITED and have.ack_wait == want.ack_wait_s:
        return []
    # add_consumer on an existing durable updates it in place: its position is kept.
    await js.add_consumer(
        want.stream,
        replace(
            have,
            filter_subject=None,
            filter_subjects=list(want.filters),
            ack_wait=want.ack_wait_s,
            max_deliver=UNLIMITED,
        ),
    )
    return [f"updated consumer {want.stream}/{want.name}"]


def _consumer_config(want: Consumer) -> api.ConsumerConfig:
    return api.ConsumerConfig(
        name=want.name,
        durable_name=want.name,
        description=want.doc,
        deliver_policy=api.DeliverPolicy.ALL,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=want.ack_wait_s,
        # The server's own limit stays open: giving up is the kit's decision, with a dead letter.
        max_deliver=UNLIMITED,
        filter_subjects=list(want.filters),
        max_ack_pending=1000,
    )


async def _bucket(js: JetStreamContext, want: Bucket, replicas: int) -> list[str]:
    try:
        await js.key_value(want.name)
    except NotFoundError:
        await js.create_key_value(
            api.KeyValueConfig(
                bucket=want.name,
                description=want.doc,
                history=1,
                ttl=want.ttl_s,
                max_bytes=want.max_bytes or UNLIMITED,
                replicas=replicas,
                storage=api.StorageType.FILE,
            )
        )
        return [f"created bucket {want.name}"]
    return []


async def _object_bucket(js: JetStreamContext, want: ObjectBucket, replicas: int) -> list[str]:
    try:
        await js.object_store(want.name)
    except NotFoundError:
        config = api.ObjectStoreConfig(
            description=want.doc, replicas=replicas, storage=api.StorageType.FILE, max_bytes=UNLIMITED
        )
        await js.create_object_store(want.name, config)
        return [f"created object bucket {want.name}"]
    return []
