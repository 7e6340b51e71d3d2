"""Garbage collection, merging, export and the audit."""

import csv
import datetime as dt
import json
import os

import pyarrow.parquet as pq
import pytest
from catalog_rows import attempt, sha, verified

import catalog
from catalog import audit, marks, parts
from catalog.compaction import compact
from catalog.errors import CatalogError, DamagedFile, QueryError
from catalog.export import export
from catalog.housekeeping import collect_garbage, merge

NOW = dt.timedelta(0)


def with_artifacts(cat, key, **columns):
    names = {name: cat.artifacts.put(f"{name} of {key}") for name in ("program_hash", "source_hash", "binary_hash", "log_hash")}
    return verified(key, **{**names, **columns})


def test_gc_deletes_what_no_row_names(cat):
    with cat.writer("r1") as writer:
        writer.append(with_artifacts(cat, 1))
        writer.append(with_artifacts(cat, 2))
        writer.append(attempt(2, attempt_no=2, log_hash=cat.artifacts.put("why")))  # the superseded row still names its own
    lost = cat.artifacts.put("nobody's")
    (cat.location.local / "rows" / ".tmp-0123").write_bytes(b"half")
    assert collect_garbage(cat).artifacts == ()  # all of it is young
    found = collect_garbage(cat, NOW, dry_run=True)
    assert (found.artifacts, found.files) == ((lost,), ("rows/.tmp-0123",)) and cat.artifacts.exists(lost)
    assert collect_garbage(cat, NOW) == found and not cat.artifacts.exists(lost)
    assert collect_garbage(cat, NOW).num_bytes == 0 and len(cat.artifacts.entries()) == 9


def test_gc_leaves_an_artifact_that_was_put_again(cat):
    name = cat.artifacts.put("again")
    os.utime(cat.artifacts.local_path(name), (0, 0))
    cat.artifacts.put("again")  # its row is on its way
    assert collect_garbage(cat, dt.timedelta(hours=1)).artifacts == ()
    os.utime(cat.artifacts.local_path(name), (0, 0))
    assert collect_garbage(cat, dt.timedelta(hours=1)).artifacts == (name,)


def test_gc_refuses_to_judge_by_half_of_the_rows(cat):
    with cat.writer("r1") as writer:
        writer.append(with_artifacts(cat, 1))
    (part,) = (cat.location.local / "rows").iterdir()
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DamagedFile):
        collect_garbage(catalog.open(cat.uri, damaged="skip"), NOW)
    assert len(cat.artifacts.entries()) == 4


def test_gc_clears_what_a_killed_compaction_left(cat):
    with cat.writer("r1") as writer:
        writer.append_all([attempt(i) for i in range(5)])
    parts.publish(cat.location, "rows", "compacted.0011223344556677.000000", cat.rows(), compacted=True)
    assert cat.count() == 5
    assert [f for f in collect_garbage(cat, NOW).files if f.startswith("rows/compacted.0011")] and cat.count() == 5


def test_merge_copies_what_is_missing_once(cat, tmp_path):
    other = catalog.open(tmp_path / "other", create=True)
    for held, run in ((cat, "here"), (other, "there")):
        with held.writer(run) as writer:
            writer.append_all([with_artifacts(held, f"{run} {i}") for i in range(3)])
            writer.append(attempt("both", "lost_node" if run == "here" else "wrong_value", program_hash=None))
    revoked = other.rows(["row_id"], "status = 'ok'")["row_id"][0].as_py()
    other.revoke("wrong", row_id=revoked)
    compact(other)
    for name in ("answers/1.json", "feedback/1.json", "asked/1.7"):
        other.location.put_new(f"transcripts/{name}", b"said")
    done = merge(other, cat)
    assert (done.rows, done.artifacts, done.revocations, done.transcripts) == (4, 12, 1, 2)
    assert cat.count() == 7 and cat.count("reason_code = 'lost_node'") == 0 and cat.count(history=True) == 8
    assert cat.get(revoked)["revoked_reason"] == "wrong" and cat.get(revoked)["run_id"] == "there"
    assert cat.artifacts.text(cat.get(revoked)["binary_hash"]).startswith("binary_hash of there")
    again = merge(other, cat)
    assert (again.rows, again.artifacts, again.revocations, again.transcripts) == (0, 0, 0, 0) and audit.verify(cat).is_clean
    compact(cat)
    assert merge(other, cat).rows == 0 and cat.count(history=True) == 8
    with pytest.raises(CatalogError, match="expected two catalogs"):
        merge(cat, catalog.open(cat.uri))


@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "parquet"])
def test_export_of_chosen_rows_with_their_artifacts(cat, tmp_path, form):
    with cat.writer("r1") as writer:
        writer.append_all([with_artifacts(cat, i, p50_s=i / 1000) for i in range(1, 5)])
    path = tmp_path / f"out.{form}"
    rows, copied = export(
        cat, path, columns=["p50_s", "samples_s", "created_at"], filters="p50_s > 0.002", artifacts=tmp_path / "files"
    )
    assert (rows, copied) == (2, 8) and len(list((tmp_path / "files").iterdir())) == 8
    match form:
        case "csv":
            held = list(csv.DictReader(path.open()))
        case "json":
            held = json.loads(path.read_text())
        case "jsonl":
            held = [json.loads(line) for line in path.read_text().splitlines()]
        case _:
            held = pq.read_table(path).to_pylist()
    assert sorted(float(row["p50_s"]) for row in held) == [0.003, 0.004]
    samples = held[0]["samples_s"]
    assert len(json.loads(samples) if form == "csv" else samples) == 3


def test_a_wrong_export_writes_nothing(cat, tmp_path):
    with pytest.raises(CatalogError, match="format: expected one of csv, json, jsonl, parquet .*found 'xlsx'"):
        export(cat, tmp_path / "out.xlsx")
    with pytest.raises(QueryError, match="no such column"):
        export(cat, tmp_path / "out.csv", columns=["nope"])
    assert not list(tmp_path.glob("out*"))


def sound(cat):
    with cat.writer("r1") as writer:
        rows = [with_artifacts(cat, i) for i in range(3)]
        writer.append_all(rows)
        writer.append(attempt("x", "lost_node", program_hash=rows[0]["program_hash"]))
        writer.append(attempt("x", "wrong_value", attempt_no=2, program_hash=rows[0]["program_hash"]))
    cat.record_run("r1", "sweep", planned=7, cached=2)  # a second try is planned, too


def test_a_sound_catalog_is_clean(cat):
    sound(cat)
    report = audit.verify(cat)
    assert report.errors == () and report.counts == {"parts": 1, "rows": 4, "journals": 0, "artifacts": 12}
    assert report.notes == ("ok: 3", "wrong_value: 1", "1 superseded attempts are kept as history")
    compact(cat)
    assert audit.verify(cat).is_clean


def test_every_kind_of_damage_is_named(cat):
    sound(cat)
    binary = cat.rows(["binary_hash"], "status = 'ok'")["binary_hash"][0].as_py()
    cat.artifacts.local_path(binary).write_bytes(b"other")
    cat.artifacts.delete(cat.rows(["log_hash"], "status = 'ok'")["log_hash"][0].as_py())
    (cat.location.local / "rows" / "stray.parquet").write_bytes(b"PAR1")
    marks.write(cat.location, "runs/r0.json", marks.RunRecord("r0", "sweep", planned=9, cached=1))
    text = "\n".join(audit.verify(cat).errors)
    for expected in (
        binary,
        "1 artifacts that rows name are missing",
        "stray.parquet: no part of ours",
        "run r0: 0 tries ended, expected 9 planned - 1",
    ):
        assert expected in text
    assert len(audit.verify(cat, artifacts=False).errors) == 2
    part = next((cat.location.local / "rows").glob("r1*"))
    part.write_bytes(part.read_bytes()[:-9])
    report = audit.verify(cat)
    assert part.name in report.errors[0] and "not checked: rows are missing" in report.notes[0]


def test_rows_of_older_versions_are_listed(cat):
    with cat.writer("r1") as writer:
        writer.append(verified(1, translator_version="1", harness_version="2"))
        writer.append(verified(2, translator_version="2", harness_version="2"))
        writer.append(attempt(3, translator_version="1"))
        writer.append(verified(4, translator_version="1"))
    cat.revoke("gone", row_id=cat.rows(["row_id"], {"attempt_key": sha("attempt 4")})["row_id"][0].as_py())
    (stale,) = audit.stale_rows(cat, translator_version="2", harness_version="2")
    assert stale["attempt_key"] == sha("attempt 1") and stale["attempt_no"] == 1
