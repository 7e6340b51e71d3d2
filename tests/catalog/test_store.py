"""The storage contract in quiet times: rows at once and sealed, the latest attempt, fences, revocations, filters, many rows."""

import datetime as dt
import os
import time

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from catalog_rows import DEVICE, attempt, keys_of, part_files, sha, verified

import catalog
from catalog import parts, schema, snapshot, writing
from catalog.compaction import compact
from catalog.errors import CatalogError, DamagedFile, FencedRun, QueryError

NOW = schema.SCHEMA_VERSION


def test_a_row_is_seen_at_once_and_survives_sealing(cat):
    with cat.writer("r1") as writer:
        row_id = writer.append(verified(1, p50_s=2e-3))
        assert cat.get(row_id)["p50_s"] == 2e-3 and not part_files(cat)  # from the live journal
        assert catalog.open(cat.uri).get(row_id[:8])["row_id"] == row_id and not part_files(cat)
    assert len(part_files(cat)) == 1 and not list((cat.location.local / "journal").iterdir())
    row = cat.get(row_id)
    assert (row["run_id"], row["sequence"], row["schema_version"]) == ("r1", 1, schema.SCHEMA_VERSION)
    assert row["verified_shapes"] == [
        {"batch": 1, "seqlen_q": 512, "seqlen_k": 512},
        {"batch": 1, "seqlen_q": 257, "seqlen_k": 257},
    ]
    assert cat.rows().schema.equals(schema.SCHEMA)


def test_sequences_grow_over_writers(cat):
    for run in ("r1", "r2", "r3"):
        with cat.writer(run) as writer:
            writer.append_all([attempt(f"{run}{i}") for i in range(3)])
    assert sorted(cat.rows(["sequence"])["sequence"].to_pylist()) == list(range(1, 10))


@pytest.mark.parametrize("sealed", [False, True])
def test_the_latest_attempt_of_a_key_counts(cat, sealed):
    with cat.writer("r1") as writer:
        writer.append(attempt(1, "lost_node"))
        if sealed:
            writer.seal()
        writer.append(verified(1, attempt_no=2))
        writer.append(attempt(2, "wrong_value"))
        assert dict(zip(*cat.rows(["attempt_no", "reason_code"]).to_pydict().values(), strict=True)) == {
            2: "ok",
            1: "wrong_value",
        }
        assert cat.count("status = 'not_run'") == 0 and cat.count(history=True) == 3


def test_a_transient_ending_never_hides_a_verdict(cat):
    with cat.writer("r1") as writer:
        writer.append(verified(1))
        writer.append(attempt(1, "lost_node", attempt_no=2))
        assert cat.rows(["reason_code"])["reason_code"].to_pylist() == ["ok"]
        writer.append(attempt(1, "wrong_value", attempt_no=3))
    assert cat.rows(["reason_code"])["reason_code"].to_pylist() == ["wrong_value"]


def test_a_task_that_ran_twice_adds_no_second_row(cat):
    with cat.writer("r1") as writer:
        assert writer.append(attempt(1)) == writer.append(attempt(1))
    assert cat.count() == 1


def test_fencing_drops_what_a_superseded_run_writes_later(cat):
    with cat.writer("old") as writer:
        writer.append(attempt("before, sealed"))
        writer.seal()
        writer.append(attempt("before, in the journal"))
        cat.fence("old")
        writer.append(attempt("after"))
        late = writing.Writer(cat.location, "old", 1000)  # another actor of the old run
        late.append(attempt("after, elsewhere"))
        late._journal.close()
        before = sorted([sha("attempt before, sealed"), sha("attempt before, in the journal")])
        assert keys_of(cat) == before and cat.view().resolved.fenced == 2
        with pytest.raises(FencedRun, match="superseded"):
            writer.seal()
        with pytest.raises(FencedRun, match="superseded"):
            cat.writer("old")
        writer._closed = True
    writer._journal.close()
    again = catalog.open(cat.uri)  # seals the orphans; their rows stay out
    assert keys_of(again) == before and again.view().resolved.fenced == 2
    with cat.writer("new") as writer:
        writer.append(attempt("after"))
    assert keys_of(cat) == sorted([*before, sha("attempt after")])


def test_revoked_rows_say_so_and_cannot_be_filtered_past(cat):
    with cat.writer("r1") as writer:
        one = writer.append(verified(1))
        writer.append_all([verified(2, binary_hash=sha("shared")), verified(3, binary_hash=sha("shared"))])
    assert cat.revoke("wrong on odd lengths", row_id=one[:10]) == 1
    assert cat.revoke("bad compiler", binary_hash=sha("shared")) == 2
    assert cat.count("revoked_at is null") == 0 and cat.count("revoked_reason = 'bad compiler'") == 2
    assert cat.get(one)["revoked_reason"] == "wrong on odd lengths" and cat.get(one)["revoked_at"].tzinfo is not None
    with pytest.raises(QueryError, match="no row has"):
        cat.revoke("x", binary_hash=sha("none"))
    with pytest.raises(CatalogError, match="reason: expected a sentence"):
        cat.revoke(" ", row_id=one)


def test_times_come_back_in_utc_and_order_is_by_sequence(cat):
    tokyo = dt.datetime(2030, 5, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=9)))  # a clock that is far ahead
    with cat.writer("r1") as writer:
        writer.append(attempt(1, created_at=tokyo))
        writer.append(attempt(1, created_at=dt.datetime(2025, 5, 1, 12, tzinfo=dt.UTC)))
        writer.append(attempt(2, created_at=tokyo))
    newest = {r["attempt_key"]: r["created_at"] for r in cat.query(columns=["attempt_key", "created_at"])}
    assert newest[sha("attempt 1")] == dt.datetime(2025, 5, 1, 12, tzinfo=dt.UTC)
    assert newest[sha("attempt 2")] == dt.datetime(2030, 5, 1, 3, tzinfo=dt.UTC)
    assert cat.count("created_at > '2026-01-01'") == 1 and cat.count("created_at <= '2030-05-01T12:00+09:00'") == 2
    with pytest.raises(QueryError, match="with a zone"):
        cat.rows(filters="created_at > '2026-01-01T00:00'")


def test_artifacts_are_checked_on_reading(cat):
    name = cat.artifacts.put(b"binary")
    path = cat.artifacts.local_path(name)
    assert cat.artifacts.get(name) == b"binary" and path.parent.parent.name == name[:2] and cat.artifacts.exists(name)
    path.write_bytes(b"bInary")
    with pytest.raises(DamagedFile, match=name):
        cat.artifacts.get(name)
    assert cat.artifacts.put(b"binary") == name and cat.artifacts.get(name) == b"binary"  # putting it again mends it
    with pytest.raises(CatalogError, match="not in"):
        cat.artifacts.get(sha("absent"))
    with pytest.raises(CatalogError, match="expected 64 hex digits"):
        cat.artifacts.get("../../etc/passwd")
    assert [e.name for e in cat.artifacts.entries()] == [name]


def test_prefixes_of_row_ids(cat):
    with cat.writer("r1") as writer:
        ids = writer.append_all([attempt(i) for i in range(40)])
    assert cat.get(ids[7])["row_id"] == ids[7]
    with pytest.raises(QueryError, match="is the beginning of"):
        for digit in "0123456789abcdef":
            if sum(i.startswith(digit) for i in ids) > 1:
                cat.get(digit)
    with pytest.raises(QueryError, match="no row begins"):
        cat.get("f" * 31)
    with pytest.raises(QueryError, match="expected hex digits"):
        cat.get("xyz")


def test_filters_and_columns_are_pushed_down_and_checked(cat):
    with cat.writer("r1") as writer:
        writer.append_all([verified(i, p50_s=i / 1000, device_key=sha(f"d{i % 2}")) for i in range(1, 11)])
    assert cat.count({"device_key": sha("d1"), "status": "ok"}) == 5
    assert cat.count({"target": ["cpu", "sm_90a"], "author": "rules", "revoked_at": None}) == 10
    assert cat.count("p50_s < 3e-3 or (p50_s >= 0.009 and not target in ('sm_90a'))") == 4
    assert cat.count("spec_name like 'sma%' and causal = true and num_heads > 4") == 10
    assert cat.count("masks is not null and target not like '%90%'") == 10
    assert cat.count(pc.field("p50_s") > 5e-3) == 5
    assert cat.rows(["p50_s", "row_id"], "p50_s = 0.001").column_names == ["p50_s", "row_id"]
    assert [r["p50_s"] for r in cat.query(columns=["p50_s"], limit=2)] == [0.01, 0.009]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p50 < 1", "p50: no such column; did you mean p50_s"),
        ("p50_s < 'x'", "p50_s: expected a value of type double, found 'x'"),
        ("status = ok", "expected a number, true, false or a text in quotes, found 'ok' at character 10"),
        ("status = 'ok' status", "expected the end, or 'and' or 'or', found 'status'"),
        ("status ; 'ok'", "cannot read \"; 'ok'\" at character 7"),
        ("(status = 'ok'", "expected ')', found the end"),
        ("samples_s = 1", "a column of lists cannot be compared"),
        ("status not 'ok'", "expected 'in' or 'like'"),
        ("", None),
    ],
)
def test_a_wrong_filter_shows_the_place(cat, text, message):
    if message is None:
        assert cat.count(text) == 0
        return
    with pytest.raises(QueryError) as caught:
        cat.rows(filters=text)
    assert message in str(caught.value)
    with pytest.raises(QueryError, match="no such column"):
        cat.rows(["nope"])


def _many(number):
    """Rows that differ in their keys only: quick to make."""
    row = verified(0)
    return [{**row, "attempt_key": sha(f"many {i}")} for i in range(number)]


def test_many_parts_of_one_row(cat, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rows = [schema.seal_row(row, run_id="r1", writer_id="w", sequence=i) for i, row in enumerate(_many(100), start=1)]
    table = pa.Table.from_pylist(rows, schema=schema.SCHEMA)
    for i in range(100):
        parts.publish(cat.location, snapshot.ROWS, f"r1.w.{i:06d}", table.slice(i, 1))
    assert cat.count() == 100 and cat.count({"device_key": DEVICE}) == 100
    with cat.writer("r2") as writer:
        writer.append(attempt("one more"))
    assert cat.count() == 101


def test_twenty_thousand_rows(cat, monkeypatch):
    """Written, seen before and after compaction, and opened in less than the two seconds that a public catalog took 81 for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with cat.writer("r1") as writer:
        rows = _many(20_000)
        for at in range(0, len(rows), 500):
            writer.append_all(rows[at : at + 500])
    assert len(part_files(cat)) == 20 and cat.count(history=True) == 20_000
    compact(cat)
    started = time.process_time()
    assert catalog.open(cat.uri).count("status = 'ok'") == 20_000 and len(part_files(cat)) == 1
    assert time.process_time() - started < 2
