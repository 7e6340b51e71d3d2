"""Compaction keeps every row once, whatever it is interrupted at; damaged parts can be set aside."""

import multiprocessing
import os
import shutil
import signal
import time

import pytest
from catalog_rows import attempt, sha, verified

import catalog
from catalog import compaction, parts, writing
from catalog.compaction import compact
from catalog.errors import CatalogError, DamagedFile
from catalog.locations import Location

SPAWN = multiprocessing.get_context("spawn")


def fill(cat, runs=3, rows=20):
    """Several parts, with superseded attempts within and across them."""
    for run in range(runs):
        with cat.writer(f"run{run}") as writer:
            writer.append_all([verified(f"{run} {i}", p50_s=1e-3 + i * 1e-6) for i in range(rows)])
            writer.append_all([attempt("retried", "lost_node", attempt_no=run + 1)])


def contents(cat):
    """Everything that compaction must not change."""
    current = sorted(cat.rows().to_pylist(), key=lambda row: row["row_id"])
    history = sorted(cat.rows(["row_id"], history=True)["row_id"].to_pylist())
    return current, history


def ids(cat):
    """The same in short."""
    table = cat.rows(["row_id", "attempt_no", "reason_code"]).sort_by("row_id")
    return table.to_pylist(), sorted(cat.rows(["row_id"], history=True)["row_id"].to_pylist())


def files(cat):
    return sorted(e.name for e in cat.location.files("rows") if e.name.endswith(parts.SUFFIX))


def test_compaction_changes_no_row(cat):
    fill(cat)
    before = contents(cat)
    report = compact(cat)
    assert (report.parts_before, report.parts_after, report.current_rows, report.history_rows) == (3, 2, 61, 2)
    assert contents(cat) == before and contents(catalog.open(cat.uri)) == before and len(files(cat)) == 2
    assert compact(cat).current_rows == 0 and contents(cat) == before  # nothing left to do


def test_parts_hold_at_most_so_many_rows(cat):
    fill(cat, runs=2, rows=30)
    before = contents(cat)
    compact(cat, rows_per_part=25)
    assert [name.num_rows for name, _ in cat.snapshot().compacted] == [25, 25, 11] and contents(cat) == before
    fill_more = [attempt(f"more {i}") for i in range(3)]
    with cat.writer("later") as writer:
        writer.append_all(fill_more)
    compact(cat, rows_per_part=25)
    assert sorted(name.num_rows for name, _ in cat.snapshot().compacted) == [14, 25, 25]  # full parts were left alone


def test_rows_after_a_compaction_supersede_rows_in_it(cat):
    fill(cat)
    compact(cat)
    key = sha("attempt 1 7")
    with cat.writer("later") as writer:
        writer.append(attempt("1 7", "wrong_value", attempt_no=2))
        assert cat.rows(["reason_code"], {"attempt_key": key})["reason_code"].to_pylist() == ["wrong_value"]
        assert cat.count({"attempt_key": key, "status": "ok"}) == 0 and cat.count() == 61
        writer.append(attempt("1 8", "lost_node", attempt_no=2))  # a transient one does not
        assert cat.count({"attempt_key": sha("attempt 1 8"), "status": "ok"}) == 1 and cat.count() == 61
    before = contents(cat)
    compact(cat)
    assert contents(cat) == before and cat.count(history=True) == 65
    assert len(cat.snapshot().compacted) == 1 and len(cat.snapshot().history) == 1


def test_full_parts_with_superseded_rows_are_rewritten(cat):
    fill(cat, runs=1, rows=19)
    compact(cat, rows_per_part=10)
    with cat.writer("later") as writer:
        writer.append(attempt("0 3", attempt_no=2))
    before = contents(cat)
    compact(cat, rows_per_part=10)
    assert contents(cat) == before and cat.view().resolved.dead_keys.to_pylist() == []


def test_live_writers_go_on(cat):
    with cat.writer("live") as writer:
        writer.append(attempt("a"))
        writer.seal()
        writer.append(attempt("b"))
        compact(cat)
        assert cat.count() == 2
        writer.append(attempt("c"))
    assert cat.count() == 3


def test_fenced_rows_are_dropped_for_good(cat):
    with cat.writer("old") as writer:
        writer.append(attempt("before"))
        cat.fence("old")
        writer.append(attempt("after"))
        writer._journal.close()
        writer._closed = True
    catalog.open(cat.uri)
    assert compact(cat).fenced_rows == 1
    assert cat.rows(["attempt_key"])["attempt_key"].to_pylist() == [sha("attempt before")]


class _Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and no clean-up of files follows (the file system calls below are the last)."""


def _dying(monkeypatch, at):
    """Every change of the location counts; the one with number `at` kills, before or after it was done."""
    done = [0]
    for name in ("put_new", "replace", "delete"):
        real = getattr(Location, name)

        def step(self, *args, _real=real, **options):
            done[0] += 1
            if done[0] == at // 2 and at % 2 == 0:
                raise _Killed
            result = _real(self, *args, **options)
            if done[0] == at // 2 and at % 2 == 1:
                raise _Killed
            return result

        monkeypatch.setattr(Location, name, step)


def test_a_compaction_killed_at_any_point_loses_and_doubles_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(parts, "WHOLE_BYTES", 1000)  # so that there are companions of large parts too
    first = catalog.open(tmp_path / "catalog", create=True)
    fill(first, runs=2, rows=8)
    compact(first, rows_per_part=5)
    with first.writer("later") as writer:
        writer.append_all([attempt(f"0 {i}", attempt_no=2) for i in range(4)])
    before = ids(first)
    point = 2
    while True:
        shutil.copytree(tmp_path / "catalog", tmp_path / f"catalog{point}")
        cat = catalog.open(tmp_path / f"catalog{point}")
        with monkeypatch.context() as context:
            _dying(context, point)
            try:
                compact(cat, rows_per_part=5)
                break
            except _Killed:
                pass
        assert ids(catalog.open(cat.uri)) == before, f"after a kill at step {point}"
        compact(cat, rows_per_part=5)
        assert ids(catalog.open(cat.uri)) == before, f"after a kill at step {point} and another compaction"
        point += 1
    assert point > 30


def _compact_forever(uri):
    cat = catalog.open(uri)
    for size in range(1, 1000):
        compact(cat, rows_per_part=3 + size % 7)


def _check_kills(cat, kills):
    fill(cat, runs=2, rows=12)
    for kill in range(kills):
        before = ids(cat)
        worker = SPAWN.Process(target=_compact_forever, args=(cat.uri,))
        worker.start()
        while not files(cat)[0].startswith("compacted"):
            time.sleep(0.005)
        time.sleep(0.003 * (kill % 29))
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        assert ids(catalog.open(cat.uri)) == before
        with cat.writer(f"after{kill}") as writer:
            writer.append(attempt(f"after {kill}"))


def test_compactions_killed_for_real(cat):
    _check_kills(cat, 2)


@pytest.mark.soak
def test_a_hundred_killed_compactions(cat):
    _check_kills(cat, 100)


def _read_until(uri, stop, counts):
    cat = catalog.open(uri, recover=False)
    while not stop.is_set():
        counts.put(cat.count())


def test_readers_are_not_disturbed(cat):
    fill(cat)
    stop, counts = SPAWN.Event(), SPAWN.Queue()
    reader = SPAWN.Process(target=_read_until, args=(cat.uri, stop, counts))
    reader.start()
    assert counts.get(timeout=60) == 61
    for size in (5, 100, 7, 100):
        compact(cat, rows_per_part=size)
    stop.set()
    seen = set()
    while reader.is_alive() or not counts.empty():
        if not counts.empty():
            seen.add(counts.get())
    reader.join()
    assert reader.exitcode == 0 and seen <= {61}


def test_one_compaction_at_a_time(cat):
    fill(cat, runs=2, rows=2)
    with compaction._alone(cat.location), pytest.raises(CatalogError, match="another compaction .* is running"):
        compact(cat)
    with pytest.raises(CatalogError, match="rows_per_part: expected at least 1"):
        compact(cat, rows_per_part=0)


def test_a_slower_compaction_gives_way(cat, monkeypatch):
    """On object stores there is no lock: the number of the record decides."""
    fill(cat, runs=2, rows=5)
    before = contents(cat)
    real = parts.publish

    def overtaken(*args, **options):
        monkeypatch.setattr(compaction, "publish", real)
        monkeypatch.setattr(compaction, "_LOCK", "other.lock")
        compact(cat)
        return real(*args, **options)

    monkeypatch.setattr(compaction, "publish", overtaken)
    with pytest.raises(CatalogError, match="another compaction of this catalog was faster"):
        compact(cat)
    assert contents(cat) == before and len(files(cat)) == 2


def test_a_damaged_record_has_a_copy(cat):
    fill(cat)
    before = contents(cat)
    compact(cat)
    (record,) = (cat.location.local / "compacted").glob("*.json")
    record.write_bytes(record.read_bytes()[:-20])
    assert contents(catalog.open(cat.uri)) == before


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_damaged_parts_can_be_set_aside(cat, how):
    fill(cat, runs=2, rows=5)
    compact(cat, rows_per_part=4)
    with cat.writer("later") as writer:
        writer.append(attempt("loose"))
    victim = cat.location.local / "rows" / str(cat.snapshot().compacted[1][0])
    whole = victim.read_bytes()
    if how == "flipped":
        victim.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    else:
        victim.unlink()
    with pytest.raises(DamagedFile, match=victim.name):
        catalog.open(cat.uri).rows()
    skipping = catalog.open(cat.uri, damaged="skip")
    assert skipping.count() == 8 and victim.name in skipping.problems[0]
    with pytest.raises(DamagedFile):
        compact(cat)
    assert compaction.drop_damaged(cat) == (victim.name,)
    assert catalog.open(cat.uri).count() == 8 and compaction.drop_damaged(cat) == ()
    assert (cat.location.local / "damaged" / victim.name).exists() == (how == "flipped")


def test_sequences_go_on_after_compaction(cat):
    fill(cat, runs=2, rows=3)
    compact(cat)
    assert writing.next_sequence(cat.snapshot()) == 9
