"""Storage that fails: torn and flipped bytes, other schemas, full disks, folders that are gone, locations of every kind."""

import errno
import os

import pyarrow.fs as pafs
import pytest
from catalog_rows import attempt, keys_of, part_files, sha, verified

import catalog
from catalog import compaction, parts, schema, upgrade, writing
from catalog.errors import DamagedFile, LocationError, NewerSchema, StorageError
from catalog.locations import Location

NOW = schema.SCHEMA_VERSION


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


@pytest.mark.parametrize("num_rows", [3, 100])
def test_compacted_rows_of_an_older_schema_and_newer_ones_over_them(cat, monkeypatch, num_rows):
    """An older release compacted, and today's adds to it: rows and superseded ones are read."""
    with cat.writer("r1") as writer:
        writer.append_all([attempt(i) for i in range(num_rows)])
    compaction.compact(cat)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", NOW + 1)
    monkeypatch.setattr(upgrade, "UPGRADES", {})
    newer = catalog.open(cat.uri)
    with newer.writer("r2") as writer:
        writer.append_all([attempt(0, attempt_no=2), attempt("new")])
        for _ in range(2):  # while they are in the journal, and once they are sealed
            reread = catalog.open(cat.uri)
            assert reread.count() == num_rows + 1 == reread.rows(["row_id"]).num_rows
            assert reread.rows(["attempt_no"], f"attempt_key = '{sha('attempt 0')}'")["attempt_no"].to_pylist() == [2]
            assert len(keys_of(reread)) == num_rows + 1
            writer.seal()
    assert compaction.compact(catalog.open(cat.uri)) and catalog.open(cat.uri).count() == num_rows + 1


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


WRONG_LOCATIONS = [
    "",
    "  ",
    "bogus://x/y",
    "s3://",
    "s3:bucket",
    "file:x",
    "a\nb",
    "\x1b[31mred",
    "\udcff",
    "~nobody-of-that-name/x",
]


@pytest.mark.parametrize("uri", [*WRONG_LOCATIONS, "x" * 256, "x/" * 2100, "file:///a%00b"])
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


@pytest.mark.parametrize(
    ("marker", "error", "message"),
    [
        ("", LocationError, "catalog.json is not the marker of a catalog; expected {"),
        ("rubbish", LocationError, "catalog.json is not the marker"),
        ("[" * 100_000, LocationError, "catalog.json is not the marker"),
        ('{"format":"another","version":1}', LocationError, "catalog.json is not the marker"),
        ('{"format":"kernel-farm catalog","version":2}', NewerSchema, "made by a later version .*format 2, here 1"),
    ],
)
@pytest.mark.parametrize("create", [False, True])
def test_a_marker_that_is_not_ours_marks_no_catalog(marker, error, message, create, tmp_path):
    (tmp_path / "catalog.json").write_text(marker)
    with pytest.raises(error, match=message):
        catalog.open(tmp_path, create=create)
    assert (tmp_path / "catalog.json").read_text() == marker and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["rows", "journal", "artifacts", "compacted", "fences", "revocations", "runs", "starts"])
def test_a_file_in_the_place_of_a_folder_is_told_before_anything_is_written(name, cat):
    place = cat.location.local / name
    assert not place.exists()
    place.write_text("")
    with pytest.raises(LocationError, match=f"{name}: expected a folder"):
        catalog.open(cat.uri)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)], ids=["folder", "pipe", "link"])
def test_a_marker_that_is_no_file_is_told(make, tmp_path):
    make(tmp_path / "catalog.json")
    with pytest.raises(LocationError, match="catalog.json: expected a file"):
        catalog.open(tmp_path, create=True)


def test_a_catalog_that_cannot_be_made_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", _no_space)
    with pytest.raises(StorageError, match="the disk is full"):
        catalog.open(tmp_path / "new", create=True)
    assert not list(tmp_path.iterdir())


def test_of_what_a_library_of_a_store_says_the_first_line_is_told(cat, monkeypatch):
    def refuse(self, name):
        raise OSError("a page:\n" + "more of it\n" * 30)

    monkeypatch.setattr(Location, "read", refuse)
    with pytest.raises(StorageError, match=r"cannot be reached \(a page:\)$"):
        catalog.open(cat.uri)


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
