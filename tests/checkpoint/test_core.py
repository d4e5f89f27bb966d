"""Tables and properties of what the checkpoint service decides."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.events.checkpoint import CheckpointDeleted, CheckpointPinned, CheckpointStaged, Chunk
from contracts.events.model import ModelPromoted
from contracts.events.run import CheckpointRef, RunAccepted, RunCancelled, RunCompleted, RunFailed
from contracts.spec.run import RunSpec
from contracts.spec.training import Evaluation, EvaluationTarget, Retention
from services.checkpoint.core import commit
from services.checkpoint.core.commit import AssembledCheckpoint, MissingParts, Refusal, SealedCheckpoint, assemble, seal
from services.checkpoint.core.digests import differences, state_digest
from services.checkpoint.core.garbage import StoredManifest, blobs_of, orphan_manifests
from services.checkpoint.core.ledger import Ledger
from services.checkpoint.core.retention import Holds, judged_uris, pinned_uris, plan
from services.kit import chunks
from tests.checkpoint.facts import RUN, blob_uri, committed, file, placed, sha, staged, tuned

B = "models"
NOW = datetime(2026, 1, 10, tzinfo=UTC)
GRACE = timedelta(days=2)


def test_all_parts_in_any_order_make_the_same_manifest() -> None:
    a = staged(B, "a", metrics={"loss": 1.0, "x": 3.0})
    b = staged(B, "b", metrics={"loss": 2.0})
    one, other = assemble(placed(), [a, b], B), assemble(placed(), [b, a, b, staged(B, "a", generation=7)], B)
    assert isinstance(one, AssembledCheckpoint)
    assert isinstance(other, AssembledCheckpoint)
    assert one == other
    assert one.ref.uri == f"s3://models/digits/{RUN}/checkpoints/epoch_1/step_00000100.g1.json"
    sealed = seal(placed(), one, {})
    assert isinstance(sealed, SealedCheckpoint)
    manifest = json.loads(sealed.manifest)
    assert [each["path"] for each in manifest["files"]] == [f"rank_{rank}.bin" for rank in range(4)]
    assert manifest["metrics"] == {"loss": 1.0, "x": 3.0}
    assert (manifest["generation"], manifest["world_size"], manifest["samples_consumed"]) == (1, 4, 6400)
    assert sealed.manifest == json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert sealed.commit.manifest_sha256 == sha(sealed.manifest)
    assert (sealed.commit.state_digest, sealed.commit.exactness) == (None, "samples-exact")


def test_the_state_digest_is_the_same_for_any_split_over_ranks_and_exact_only_if_all_parts_are() -> None:
    digests = {f"model/{name}": sha(name.encode()) for name in "abcd"} | {"state": sha(b"s")}
    names = sorted(digests)
    parts = [staged(B, node, exactness="exact") for node in ("a", "b")]
    commits = []
    for ranks in (1, 2, 4):
        shares = {
            f"digests-{r}.json": json.dumps({n: digests[n] for n in names[r::ranks]}).encode() for r in range(ranks)
        }
        assembled = assemble(placed(), parts, B)
        assert isinstance(assembled, AssembledCheckpoint)
        sealed = seal(placed(), assembled, shares)
        assert isinstance(sealed, SealedCheckpoint)
        commits.append(sealed.commit)
    assert {commit.state_digest for commit in commits} == {state_digest(digests)}
    assert {commit.exactness for commit in commits} == {"exact"}
    mixed = assemble(placed(), [parts[0], staged(B, "b")], B)
    assert isinstance(mixed, AssembledCheckpoint)
    assert mixed.exactness == "samples-exact"
    other = {
        "digests-0.json": b'{"model/a": "%s"}' % sha(b"1").encode(),
        "digests-1.json": b'{"model/a": "%s"}' % sha(b"2").encode(),
    }
    for shares, words in ((other, "disagree about 'model/a'"), ({"digests-0.json": b"[1]"}, "holds no digests")):
        refusal = seal(placed(), mixed, shares)
        assert isinstance(refusal, Refusal)
        assert words in refusal.reason


def chain(depth: int, **fields: Any) -> Chunk:
    """A piece as a difference on ``depth`` others."""
    link = file(B, "x", b"base").chunks[0]
    for number in range(depth):
        delta = f"delta {number}".encode()
        values: dict[str, Any] = {
            "sha256": sha(b"piece"),
            "size_bytes": 5,
            "uri": blob_uri(B, delta),
            "encoding": "xor-zstd",
            "stored_bytes": len(delta),
            "base": link,
        }
        link = Chunk(**{**values, **(fields if number == depth - 1 else {})})
    return link


CHAINS: dict[str, tuple[Chunk, str]] = {
    "one": (chain(1), ""),
    "as long as may be": (chain(4), ""),
    "too long": (chain(5), "more than 4 others"),
    "to nothing": (chain(2, base=None), "to what"),
    "of no size": (chain(1, stored_bytes=None), "of which size"),
    "elsewhere": (chain(1, uri="s3://models/elsewhere"), "as blobs by their hash"),
    "of another bucket": (chain(1, uri=blob_uri("lake", b"x")), "as blobs by their hash"),
    "plain and yet with a base": (chain(1, encoding="plain", uri=blob_uri(B, b"piece"), stored_bytes=5), "with a base"),
}


@pytest.mark.parametrize("case", CHAINS)
def test_differences_are_blobs_on_blobs_in_short_chains(case: str) -> None:
    chunk, words = CHAINS[case]
    parts = [staged(B, "a", files=(file(B, "x", b"piece", chunks=(chunk,)),)), staged(B, "b", files=())]
    found = assemble(placed(), parts, B)
    if words:
        assert isinstance(found, Refusal)
        assert words in found.reason
        return
    assert isinstance(found, AssembledCheckpoint)
    assert {blob.uri: blob.size_bytes for blob in found.blobs} == {
        uri: len("delta 0") if uri != blob_uri(B, b"base") else 4 for uri in chunk.uris
    }
    sealed = seal(placed(), found, {})
    assert isinstance(sealed, SealedCheckpoint)
    assert blobs_of(sealed.manifest) == set(chunk.uris)


def test_it_waits_for_missing_ranks_and_does_not_listen_to_strangers() -> None:
    assert assemble(placed(), [staged(B, "b")], B) == MissingParts((0, 1))
    assert assemble(placed(), [staged(B, "b"), staged(B, "stranger")], B) == MissingParts((0, 1))
    assert assemble(placed(2), [staged(B, "a"), staged(B, "b")], B) == MissingParts((0, 1, 2, 3))
    for lie in ({"ranks": (2,)}, {"ranks": (0, 1, 2, 3), "is_whole": True}, {"world_size": 8}):
        parts = [staged(B, "a"), staged(B, "b", **lie)]
        assert assemble(placed(), parts, B) == MissingParts((2, 3)), lie
        assert isinstance(assemble(placed(), [*parts, staged(B, "b")], B), AssembledCheckpoint), lie


BAD_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "another sample": ({"samples_consumed": 5}, "disagree"),
    "outside the folder": ({"files": (file(B, "x/../../etc/passwd", b""),)}, "leaves the checkpoint's folder"),
    "no blob": (
        {"files": (file(B, "x", b"", chunks=(Chunk(sha256=sha(b""), size_bytes=0, uri="s3://models/elsewhere"),)),)},
        "as blobs by their hash",
    ),
    "other bucket": ({"files": (file("lake", "x", b""),)}, "as blobs by their hash"),
    "same name": ({"files": (file(B, "rank_0.bin", b"else"),)}, "two ranks wrote different contents"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_parts_that_do_not_fit_are_refused_in_words(case: str) -> None:
    fields, words = BAD_PARTS[case]
    refusal = assemble(placed(), [staged(B, "a"), staged(B, "b", **fields)], B)
    assert isinstance(refusal, Refusal)
    assert words in refusal.reason


def test_the_first_word_of_a_node_counts() -> None:
    second_thoughts = staged(B, "a", files=(file(B, "rank_0.bin", b"other"),))
    first = assemble(placed(), [staged(B, "a"), staged(B, "b")], B)
    assert assemble(placed(), [staged(B, "a"), second_thoughts, staged(B, "b")], B) == first


def steps_deleted(losses: list[float | None], retention: Retention, **options: Any) -> list[int]:
    commits = [committed(10 * (n + 1), loss, final=options.get("final") == n) for n, loss in enumerate(losses)]
    by_step = {commit.checkpoint.step: commit.checkpoint.uri for commit in commits}
    deleted = {by_step[step] for step in options.get("deleted", ())}
    held = {by_step[step] for step in options.get("held", ())}
    return [deletion.step for deletion in plan(commits, deleted, retention, held)]


NAN = math.nan
RETENTION: dict[str, tuple[list[float | None], Retention, dict[str, Any], list[int]]] = {
    "few": ([1, 2], Retention(last=3), {}, []),
    "last three and the best": ([1, 0.1, 3, 4, 5, 6], Retention(last=3, best=1), {}, [10, 30]),
    "best is among the last": ([5, 4, 3, 2, 1], Retention(last=2, best=1), {}, [10, 20, 30]),
    "best two by max": ([9, 8, 1, 2, 3], Retention(last=2, best=2, mode="max"), {}, [30]),
    "of equals the newer": ([1, 1, 5, 5], Retention(last=2, best=1), {}, [10]),
    "no metric": ([None, None, None, None], Retention(last=2, best=2), {}, [10, 20]),
    "nan is no best": ([NAN, 7, 8, 9], Retention(last=2, best=1), {}, [10]),
    "held": ([4, 3, 2, 1], Retention(last=2, best=0), {"held": [10]}, [20]),
    "deleted before": ([4, 3, 2, 1], Retention(last=2, best=0), {"deleted": [10]}, [20]),
    "last one keeps two while it runs": ([4, 3, 2], Retention(last=1, best=0), {}, [10]),
    "last one at the end": ([4, 3, 2], Retention(last=1, best=0), {"final": 2}, [10, 20]),
    "every so many steps": ([5, 4, 3, 2, 1, 1], Retention(last=2, best=0, every_steps=20), {}, [10, 30]),
    "final is kept": ([4, 3, 2, 1], Retention(last=1, best=0), {"final": 0}, [20, 30]),
}


@pytest.mark.parametrize("case", RETENTION)
def test_retention(case: str) -> None:
    losses, retention, options, gone = RETENTION[case]
    assert steps_deleted(losses, retention, **options) == gone


@pytest.mark.parametrize(("choice", "kept"), [(None, {10}), ("best", {10}), ("final", set())])
def test_what_evaluation_would_measure_stays_however_few_are_kept(choice: Any, kept: set[int]) -> None:
    spec = RunSpec(name="r", command=["x"], model="m", evaluation=Evaluation(metric="m", mode="max", checkpoint=choice))
    commits = [committed(10, 0.1), committed(20, 0.2), committed(30, 0.3)]
    found = judged_uris(spec, commits, set())
    assert found == {each.checkpoint.uri for each in commits if each.checkpoint.step in kept}
    gone = {each.step for each in plan(commits, set(), Retention(last=1, best=0), found)}
    assert gone == {10} - kept
    # Without it the next best is judged.
    assert judged_uris(spec, commits, {commits[0].checkpoint.uri}) == ({commits[1].checkpoint.uri} if kept else set())
    assert judged_uris(RunSpec(name="r", command=["x"]), commits, set()) == set()


@given(
    st.lists(st.none() | st.floats(), max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sets(st.integers(0, 11)),
)
def test_the_newest_and_the_held_always_stay(losses: list[float | None], last: int, best: int, held: set[int]) -> None:
    retention = Retention(last=last, best=best)
    commits = [committed(n, loss) for n, loss in enumerate(losses)]
    held_uris = {commits[n].checkpoint.uri for n in held if n < len(commits)}
    gone = {deletion.uri for deletion in plan(commits, set(), retention, held_uris)}
    assert not gone & (held_uris | {commit.checkpoint.uri for commit in commits[-last:]})
    assert len(commits) - len(gone) <= max(last, 2) + best + len(held_uris)
    # Once carried out, nothing more is to do.
    assert not plan(commits, gone, retention, held_uris)


def test_champions_and_what_a_result_came_from_are_held_for_ever_the_rest_until_its_run_ends() -> None:
    holds = Holds()
    uri = committed(10).checkpoint.uri
    spec = RunSpec(name="e", kind="evaluate", command=["x"], evaluate=EvaluationTarget(run_id=RUN, checkpoint_uri=uri))
    holds.apply(RunAccepted(run_id="re", spec=spec, request_id="1", request_source="s"))
    resume = CheckpointRef(uri=uri, step=10, epoch=1, samples_consumed=1)
    holds.apply(placed(run="rother", resume=resume))
    holds.apply(placed(2, resume=committed(20).checkpoint))  # its own: not held
    assert uri in holds
    assert committed(20).checkpoint.uri not in holds
    holds.apply(RunFailed(run_id="re", reason="it broke"))
    assert uri in holds
    holds.apply(RunCancelled(run_id="rother", reason="by request"))
    assert uri not in holds
    holds.apply(tuned(uri))
    holds.apply(placed(run="rtuned"))
    # It may be killed before its first checkpoint.
    assert uri in holds
    holds.apply(RunCompleted(run_id="rtuned", generation=1))
    assert uri in holds
    for version, step in enumerate((30, 40), start=1):
        checkpoint = committed(step).checkpoint.uri
        holds.apply(ModelPromoted(model="m", version=version, run_id=RUN, checkpoint_uri=checkpoint))
    assert all(committed(step).checkpoint.uri in holds for step in (30, 40))


def test_the_last_word_on_a_pin_counts() -> None:
    def pin(uri: str, wanted: bool) -> CheckpointPinned:
        return CheckpointPinned(run_id=RUN, uri=uri, step=1, pinned=wanted, request_id=f"{uri}{wanted}")

    one, two = "s3://models/one", "s3://models/two"
    assert pinned_uris([pin(one, True), pin(two, True), pin(one, False)]) == {two}
    assert pinned_uris([pin(one, False), pin(one, True)]) == {one}


def test_differences_of_two_states_are_named() -> None:
    assert differences({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"}) == [
        ("a", "only in the first"),
        ("c", "differs"),
        ("d", "only in the second"),
    ]


def stored(uri: str, age_days: float) -> StoredManifest:
    return StoredManifest(uri, NOW - timedelta(days=age_days))


def fold(facts: list[tuple[Any, float]]) -> Ledger:
    """Return the ledger of facts with their ages in days."""
    ledger = Ledger()
    for sequence, (fact, age_days) in enumerate(facts, 1):
        ledger.apply(fact, NOW - timedelta(days=age_days), sequence)
    return ledger


def removed(step: int) -> CheckpointDeleted:
    return CheckpointDeleted(run_id=RUN, uri=committed(step).checkpoint.uri, step=step, reason="")


GARBAGE: dict[str, tuple[list[Any], bool]] = {
    "staged, may be committed yet": ([(placed(), 9), (staged(B, "a"), 9)], False),
    "staged before we know of the placement": ([(staged(B, "a"), 9)], False),
    "zombie's, long ago": ([(placed(), 9), (staged(B, "a"), 9), (placed(2), 8)], True),
    "zombie's, just now": ([(placed(), 9), (staged(B, "a"), 1), (placed(2), 1)], False),
    "committed, manifest gone": (
        [(placed(), 9), (staged(B, "a"), 9), (committed(100), 9), (removed(100), 8)],
        True,
    ),
    "staged, and its run is over": (
        [(placed(), 9), (staged(B, "a"), 9), (RunFailed(run_id=RUN, generation=1, reason="broke"), 8)],
        True,
    ),
    "staged, and somebody says that its run is over": (
        [(placed(), 9), (staged(B, "a"), 9), (RunCompleted(run_id=RUN, generation=1), 8)],
        False,
    ),
    "manifest gone just now, so perhaps somebody's base": (
        [(placed(), 9), (staged(B, "a"), 9), (committed(100), 9), (removed(100), 1)],
        False,
    ),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_is_what_no_facts_need(case: str) -> None:
    facts, is_garbage = GARBAGE[case]
    places = [sequence for sequence, (fact, _) in enumerate(facts, 1) if isinstance(fact, CheckpointStaged)]
    pending = [sequence for parts in fold(facts).pending(NOW - GRACE) for sequence in parts.sequences]
    assert pending == ([] if is_garbage else places)


def test_a_manifest_that_a_run_begins_with_stays_until_that_run_is_over() -> None:
    uri = committed(30).checkpoint.uri
    facts: list[tuple[Any, float]] = [(fact, 9) for fact in (placed(1), committed(30), tuned(uri), removed(30))]
    manifests = [stored(uri, 9)]
    assert orphan_manifests(manifests, fold(facts), NOW - GRACE) == []
    facts.append((RunFailed(run_id="rtuned", reason="it is over"), 9))
    assert orphan_manifests(manifests, fold(facts), NOW - GRACE) == manifests


def test_orphan_manifests_are_the_deleted_and_the_superseded_only() -> None:
    deleted = committed(30).checkpoint.uri
    facts = (placed(1), committed(10), committed(30), placed(2), removed(30))
    ledger = fold([(fact, 0) for fact in facts])
    ages = {
        committed(10).checkpoint.uri: 9,  # committed
        committed(20).checkpoint.uri: 9,  # of generation 1, never committed
        committed(21).checkpoint.uri: 1,  # the same, but young
        deleted: 9,
        committed(20, generation=2).checkpoint.uri: 9,  # may be committed yet
        committed(20, run="runknown").checkpoint.uri: 9,
    }
    found = orphan_manifests([stored(uri, age) for uri, age in ages.items()], ledger, NOW - GRACE)
    assert {each.uri for each in found} == {committed(20).checkpoint.uri, deleted}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"files": [1]}', b"\xff"])
def test_what_is_no_manifest_stops_the_collection(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        blobs_of(body)


def test_what_is_committed_is_never_too_long_a_chain_to_be_restored() -> None:
    assert commit.MAX_CHAIN == chunks.MAX_CHAIN


def test_the_end_of_an_old_generation_releases_no_checkpoint() -> None:
    holds, other = Holds(), "s3://models/x/rparent/checkpoints/epoch_1/step_1.g1.json"
    spec = RunSpec(name="tuned", command=["true"], init_from=other)
    holds.apply(RunAccepted(run_id="rt", spec=spec, request_id="1", request_source="s"))
    for generation in (1, 2):
        holds.apply(placed(generation, run="rt"))
    holds.apply(RunFailed(run_id="rt", generation=1, reason="it broke"))
    assert other in holds
    holds.apply(RunFailed(run_id="rt", generation=2, reason="it broke"))
    assert other not in holds
