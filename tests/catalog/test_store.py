"""The storage contract: durable rows, torn and flipped bytes, writers that die, fences, resuming reads of every state."""

import datetime as dt
import errno
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pytest
from catalog_rows import DEVICE, attempt, sha, verified

import catalog
from catalog import parts, schema, snapshot, upgrade, writing
from catalog.compaction import compact
from catalog.errors import CatalogError, DamagedFile, FencedRun, LocationError, NewerSchema, QueryError, StorageError
from catalog.locations import Location

SPAWN = multiprocessing.get_context("spawn")

NOW = schema.SCHEMA_VERSION


@pytest.fixture
def cat(tmp_path):
    return catalog.open(tmp_path / "catalog", create=True)


def keys_of(cat, **options):
    return sorted(cat.rows(["attempt_key"], **options)["attempt_key"].to_pylist())


def part_files(cat):
    return sorted((cat.location.local / "rows").glob("*.parquet"))


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


def test_a_torn_last_line_is_left_out(cat):
    writer = cat.writer("r1")
    writer.append_all([attempt(i) for i in range(3)])
    path = writer._journal.path
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 1, 97):
        path.write_bytes(whole[:-cut])
        assert catalog.open(cat.uri, recover=False).count() == 2
    path.write_bytes(b"")
    assert catalog.open(cat.uri, recover=False).count() == 0


def test_a_flipped_byte_in_a_journal_costs_its_line_and_is_kept_for_inspection(cat):
    writer = cat.writer("r1")
    writer.append_all([attempt(i) for i in range(3)])
    path = writer._journal.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    writer._journal.close()
    assert catalog.open(cat.uri).count() == 2
    assert [p.suffix for p in (cat.location.local / "journal").iterdir()] == [".damaged"]


def test_every_flipped_byte_of_a_part_is_noticed(cat):
    with cat.writer("r1") as writer:
        writer.append_all([attempt(i) for i in range(parts.FEW_ROWS + 1)])
    (part,) = part_files(cat)
    whole = part.read_bytes()
    for at in [*range(0, len(whole), len(whole) // 40), len(whole) - 1, len(whole) - 6]:
        flipped = bytearray(whole)
        flipped[at] ^= 4
        part.write_bytes(flipped)
        with pytest.raises(DamagedFile, match=part.name):
            catalog.open(cat.uri).rows(["row_id"])
        skipping = catalog.open(cat.uri, damaged="skip")
        assert skipping.count() == 0 and part.name in skipping.problems[0]
    part.write_bytes(whole)
    assert catalog.open(cat.uri).count() == parts.FEW_ROWS + 1


def test_a_truncated_part_is_never_half_read(cat):
    with cat.writer("r1") as writer:
        writer.append_all([attempt(i) for i in range(3)])
    (part,) = part_files(cat)
    whole = part.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        part.write_bytes(whole[:size])
        with pytest.raises(DamagedFile, match="farm catalog verify"):
            catalog.open(cat.uri).rows()


def test_large_parts_are_checked_block_by_block(cat, monkeypatch):
    monkeypatch.setattr(parts, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(parts, "BLOCK_BYTES", 4096)
    with cat.writer("r1") as writer:
        writer.append_all([attempt(i, message=sha(f"{i}")) for i in range(300)])
    (part,) = part_files(cat)
    blocks = part.with_name(part.name + parts.BLOCKS_SUFFIX)
    assert keys_of(catalog.open(cat.uri)) == sorted(sha(f"attempt {i}") for i in range(300))
    whole, hashes = part.read_bytes(), blocks.read_bytes()
    for at in range(0, len(whole), len(whole) // 30):
        part.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedFile, match=part.name):
            catalog.open(cat.uri).rows()
    part.write_bytes(whole)
    for companion in (None, hashes[:-1], b"x" + hashes[1:]):  # lost or damaged: the part itself is hashed instead
        blocks.unlink(missing_ok=True)
        if companion is not None:
            blocks.write_bytes(companion)
        assert catalog.open(cat.uri).count() == 300


@pytest.mark.parametrize("num_rows", [1, 100])
def test_a_newer_schema_is_refused_by_name(cat, monkeypatch, num_rows):
    with cat.writer("r1") as writer:
        writer.append(attempt("known"))
    with monkeypatch.context() as later:
        later.setattr(schema, "SCHEMA_VERSION", NOW + 1)
        writer = cat.writer("r2")
        writer.append_all([attempt(i) for i in range(num_rows)])
    refused = f"has schema version {NOW + 1}, this program reads up to {NOW}; update kernel-farm here"
    with pytest.raises(NewerSchema, match=f"journal/r2.*{refused}"):
        catalog.open(cat.uri).rows()
    assert catalog.open(cat.uri, damaged="skip").count() == 1
    with monkeypatch.context() as later:
        later.setattr(schema, "SCHEMA_VERSION", NOW + 1)
        writer.close()
    with pytest.raises(NewerSchema, match=f"rows.*{refused}"):
        catalog.open(cat.uri).rows()
    assert catalog.open(cat.uri, damaged="skip").count() == 1


@pytest.mark.parametrize("num_rows", [1, 100])
def test_an_older_schema_is_upgraded_at_read(cat, monkeypatch, num_rows):
    with cat.writer("r1") as writer:
        writer.append_all([attempt(i, message="old") for i in range(num_rows)])
        writer.seal()
        writer.append(attempt("live", message="old"))
        monkeypatch.setattr(schema, "SCHEMA_VERSION", NOW + 1)
        renamed = upgrade.Upgrade(renamed={"message": "stop_reason"}, filled={"clock_lock": "unknown"})
        monkeypatch.setattr(upgrade, "UPGRADES", {NOW: renamed})
        table = catalog.open(cat.uri).rows(["stop_reason", "message", "clock_lock"], "clock_lock = 'unknown'")
        assert table.num_rows == num_rows + 1
        assert set(table["stop_reason"].to_pylist()) == {"old"} and table["message"].null_count == num_rows + 1


def _write_forever(uri, run, number):
    cat = catalog.open(uri)
    with cat.writer(run) as writer:
        for i in range(number):
            writer.append(attempt(f"{run} {i}"))


def test_two_processes_write_at_once(cat):
    workers = [SPAWN.Process(target=_write_forever, args=(cat.uri, f"run{i}", 60)) for i in range(2)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        cat.rows(["row_id"])  # readers see every state on the way
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert keys_of(cat) == sorted(sha(f"attempt run{r} {i}") for r in range(2) for i in range(60))
    assert cat.count(history=True) == 120


def _killed_while_writing(cat, run, seconds):
    """Rows that a killed writer had been told are stored."""
    receive, send = SPAWN.Pipe(duplex=False)
    worker = SPAWN.Process(target=_write_and_tell, args=(cat.uri, run, send))
    worker.start()
    told = [receive.recv()]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if receive.poll(0.001):
            told.append(receive.recv())
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    send.close()
    try:
        while receive.poll(0):
            told.append(receive.recv())
    except EOFError:
        pass
    return told


def _write_and_tell(uri, run, send):
    writing.SEAL_ROWS = 7  # many seals, so that kills fall into them too
    cat = catalog.open(uri)
    writer = cat.writer(run)
    for i in range(100_000):
        writer.append(attempt(f"{run} {i}"))
        send.send(i)


def _check_after_kills(cat, kills):
    told = {}
    for kill in range(kills):
        told[kill] = _killed_while_writing(cat, f"run{kill}", 0.01 + 0.02 * (kill % 7))
        opened = catalog.open(cat.uri, recover=kill % 2 == 0)
        held = keys_of(opened)
        assert len(set(held)) == len(held)
        for run, rows in told.items():
            mine = {sha(f"attempt run{run} {i}") for i in rows}
            assert mine <= set(held), f"run{run} lost rows that it was told are stored"
    assert catalog.open(cat.uri).recover() == 0
    assert catalog.open(cat.uri).count() >= sum(map(len, told.values()))


def test_kills_during_writing_lose_no_stored_row(cat):
    _check_after_kills(cat, 3)


@pytest.mark.soak
def test_hundreds_of_kills_during_writing(cat):
    _check_after_kills(cat, 200)


def test_a_live_journal_is_read_but_not_sealed(cat):
    with cat.writer("r1") as writer:
        writer.append(attempt(1))
        other = catalog.open(cat.uri)
        assert other.recover() == 0 and other.count() == 1 and not part_files(cat)
        writer.append(attempt(2))
        assert other.count() == 2


def test_a_writer_that_dies_between_sealing_and_tidying_doubles_nothing(cat, monkeypatch):
    writer = cat.writer("r1")
    writer.append(attempt(1))
    monkeypatch.setattr(type(writer._journal.path), "unlink", lambda *a, **k: os.kill)  # the journal stays
    writer.close()
    monkeypatch.undo()
    assert len(part_files(cat)) == 1 and len(list((cat.location.local / "journal").iterdir())) == 1
    assert cat.count(history=True) == 1
    assert catalog.open(cat.uri).count(history=True) == 1 and not list((cat.location.local / "journal").iterdir())


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


def _no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_clear_message_and_loses_nothing(cat, monkeypatch):
    writer = cat.writer("r1")
    writer.append(attempt(1))
    real = os.write

    def half(descriptor, data):
        return real(descriptor, data[: len(data) // 2]) if len(data) > 100 else _no_space()

    with monkeypatch.context() as full:
        full.setattr(os, "write", half)
        with pytest.raises(StorageError, match="the disk is full; make room"):
            writer.append(attempt(2))
        assert keys_of(cat) == [sha("attempt 1")]
        full.setattr(os, "ftruncate", _no_space)
        with pytest.raises(StorageError, match="the disk is full"):
            writer.append(attempt(3))
        assert keys_of(cat) == [sha("attempt 1")]
    writer.append(attempt(4))
    with monkeypatch.context() as full:
        full.setattr(os, "link", _no_space)
        with pytest.raises(StorageError, match="the disk is full"):
            writer.close()  # sealing fails; the journals keep the rows
    expected = sorted([sha("attempt 1"), sha("attempt 4")])
    assert keys_of(cat) == expected and not part_files(cat)
    assert keys_of(catalog.open(cat.uri)) == expected and len(part_files(cat)) == 2


def test_a_folder_that_is_gone_for_a_minute_costs_the_rows_of_that_minute(cat, monkeypatch):
    with cat.writer("r1") as writer:
        writer.append(attempt(1))
        with monkeypatch.context() as gone:
            gone.setattr(os, "fsync", lambda d: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
            for i in (2, 3):
                with pytest.raises(StorageError, match="appending rows failed: .*Stale file handle"):
                    writer.append(attempt(i))
        writer.append(attempt(4))
        assert keys_of(cat) == sorted([sha("attempt 1"), sha("attempt 4")])
    assert keys_of(catalog.open(cat.uri)) == sorted([sha("attempt 1"), sha("attempt 4")])
    assert not list((cat.location.local / "journal").iterdir())


def test_a_row_is_stored_even_when_it_cannot_be_sealed_yet(cat, monkeypatch):
    monkeypatch.setattr(writing, "SEAL_ROWS", 2)
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 0.0)
    writer = cat.writer("r1")
    with monkeypatch.context() as full:
        full.setattr(os, "link", _no_space)
        writer.append(attempt(1))
        with pytest.warns(RuntimeWarning, match="the disk is full.*stay in the journal"):
            writer.append(attempt(2))
        writer.append(attempt(3))
    assert cat.count() == 3 and not part_files(cat)
    writer.append(attempt(4))
    assert cat.count() == 4 and len(part_files(cat)) == 2
    writer.close()


def test_a_file_system_without_hard_links(cat, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *a: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "Operation not supported")))
    with cat.writer("r1") as writer:
        writer.append(attempt(1))
    name = cat.artifacts.put("x")
    assert cat.artifacts.put("x") == name and len(part_files(cat)) == 1 and catalog.open(cat.uri).count() == 1


def test_a_read_only_location_can_be_read(cat, monkeypatch):
    writer = cat.writer("r1")
    writer.append(attempt(1))
    writer._journal.close()
    real = open

    def refusing(path, mode="r", *a, **k):
        if set(mode) & set("wxa+"):
            raise OSError(30, "Read-only file system")
        return real(path, mode, *a, **k)

    monkeypatch.setattr("builtins.open", refusing)
    reader = catalog.open(cat.uri)
    assert reader.count() == 1 and not part_files(cat)
    with pytest.raises(StorageError, match="read-only; choose another location"):
        reader.artifacts.put(b"x")


@pytest.mark.parametrize("uri", ["", "  ", "bogus://x/y", "s3://"])
def test_a_wrong_location_is_one_clear_line(uri):
    with pytest.raises(LocationError, match="^catalog: ") as caught:
        catalog.open(uri, create=True)
    assert "\n" not in str(caught.value)


def test_opening_creates_nothing_unless_asked(tmp_path):
    with pytest.raises(LocationError, match="no catalog at .*; `farm sweep"):
        catalog.open(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(LocationError, match="is a file; expected a folder"):
        catalog.open(tmp_path / "file", create=True)
    with pytest.raises(LocationError, match="has other files in it"):
        catalog.open(tmp_path, create=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def remote(filesystem, path):
    return Location(filesystem, path, f"mock://{path}")


@pytest.mark.parametrize("kind", ["memory", "subtree"])
def test_a_location_that_is_not_local(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bucket").mkdir()
    filesystem = (
        pafs._MockFileSystem() if kind == "memory" else pafs.SubTreeFileSystem(str(tmp_path / "bucket"), pafs.LocalFileSystem())
    )
    location = remote(filesystem, "team/catalog")
    cat = catalog.open(location, create=True)
    with cat.writer("r1") as writer:
        writer.append_all([verified(i) for i in range(100)])
        assert cat.count() == 100 and not location.files("rows")  # local until sealed
    assert len(location.files("rows")) == 1 and catalog.open(location).count() == 100
    name = cat.artifacts.put("text")
    assert cat.artifacts.put("text") == name and cat.artifacts.text(name) == "text" and cat.artifacts.local_path(name) is None
    writer = cat.writer("r2")
    writer.append(attempt("orphan"))
    writer._journal.close()
    assert catalog.open(location).count() == 101 and len(location.files("rows")) == 2
    cat.fence("r2")
    cat.revoke("no", binary_hash=sha("binary 3"))
    assert cat.count("revoked_at is null") == 100


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


def test_a_writer_belongs_to_one_process_and_ends_once(cat):
    writer = cat.writer("r1")
    writer.close()
    writer.close()
    with pytest.raises(CatalogError, match="it was closed"):
        writer.append(attempt(1))
    for run in ("", "a b", "../x", "compacted", "x" * 65):
        with pytest.raises(CatalogError, match="run_id: expected 1 to 64"):
            cat.writer(run)


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


def _put_forever(uri, number):
    cat = catalog.open(uri)
    for i in range(100_000):
        cat.artifacts.put(f"artifact {i % 40}" * 1000)


def test_artifacts_of_processes_that_are_killed_are_whole_or_absent(cat):
    workers = [SPAWN.Process(target=_put_forever, args=(cat.uri, i)) for i in range(3)]
    for worker in workers:
        worker.start()
    while len(cat.artifacts.entries()) < 20:
        time.sleep(0.005)
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    held = cat.artifacts.entries()
    assert all(sha(cat.artifacts.text(entry.name)) == entry.name for entry in held) and len(held) >= 20


def test_threads_share_a_catalog_and_a_writer(cat):
    with cat.writer("r1") as writer, ThreadPoolExecutor(8) as pool:
        stored = pool.map(lambda i: (writer.append(attempt(i)), cat.count()), range(60))
        counts = [count for _, count in stored]
    assert cat.count() == 60 and min(counts) >= 1
    sequences = cat.rows(["sequence"])["sequence"].to_pylist()
    assert sorted(sequences) == list(range(1, 61))


def _create_and_write(uri, number):
    cat = catalog.open(uri, create=True)
    with cat.writer(f"run{number}") as writer:
        writer.append(attempt(number))


def test_two_processes_create_a_catalog_at_once(tmp_path):
    workers = [SPAWN.Process(target=_create_and_write, args=(str(tmp_path / "catalog"), i)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0] and catalog.open(tmp_path / "catalog").count() == 3
