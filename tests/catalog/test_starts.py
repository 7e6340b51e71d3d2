"""Starts of a sweep: a later one fences the earlier ones, by itself, unless they ended or are known to be dead."""

import multiprocessing
import os
import signal

import pytest
from catalog_rows import attempt, sha

import catalog
from catalog import audit, starts
from catalog.errors import FencedRun

SPAWN = multiprocessing.get_context("spawn")


def keys_of(cat):
    return sorted(cat.rows(["attempt_key"])["attempt_key"].to_pylist())


def test_what_an_earlier_start_still_writes_is_dropped_by_every_reader(cat):
    assert cat.start_run("first", "sweep") == ()
    with cat.writer("first") as old:
        old.append(attempt("before"))
        assert cat.start_run("second", "sweep") == ("first",)
        old.append(attempt("after"))
        for reader in (cat, catalog.open(cat.uri)):
            assert keys_of(reader) == [sha("attempt before")] and reader.is_fenced("first") and not reader.is_fenced("second")
        with pytest.raises(FencedRun, match="later start"):
            old.close()
    with cat.writer("second") as writer:
        writer.append(attempt("after"))
    assert keys_of(catalog.open(cat.uri)) == sorted([sha("attempt before"), sha("attempt after")])
    assert audit.verify(cat, artifacts=False).is_clean
    with pytest.raises(FencedRun):
        cat.writer("first")


def test_what_ended_and_other_sweeps_are_left_alone(cat):
    cat.start_run("a", "sweep")
    cat.record_run("a", "sweep", 0, 0)
    cat.start_run("b", "another sweep")
    cat.start_run("c", "sweep", "another machine")
    assert cat.start_run("d", "sweep") == ()
    assert not any(cat.is_fenced(run) for run in "abcd")


def test_the_record_of_a_superseded_run_is_held_against_nobody(cat):
    cat.start_run("a", "sweep")
    cat.start_run("b", "sweep")
    with cat.writer("b") as writer:
        writer.append(attempt(1))
    cat.record_run("a", "sweep", 7, 0)  # by a process that had not noticed yet
    cat.record_run("b", "sweep", 1, 0)
    assert audit.verify(cat, artifacts=False).is_clean


def _start_and_die(uri):
    catalog.open(uri).start_run("dead", "sweep")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_of_this_machine_needs_no_fence(cat):
    child = SPAWN.Process(target=_start_and_die, args=(cat.uri,))
    child.start()
    child.join()
    assert cat.start_run("next", "sweep") == () and not cat.is_fenced("dead")


def test_a_process_of_another_machine_is_never_taken_for_dead(cat, monkeypatch):
    monkeypatch.setattr(starts, "_machine", lambda: "elsewhere")
    cat.start_run("far", "sweep")
    monkeypatch.undo()
    assert cat.start_run("here", "sweep") == ("far",)


def test_the_order_of_starts_is_counted_and_needs_no_clock(cat, monkeypatch):
    """A start whose clock is an hour slow still supersedes the one before it, and run ids order nothing."""
    cat.start_run("20990101T000000-ffff", "sweep")
    assert cat.start_run("20200101T000000-0000", "sweep") == ("20990101T000000-ffff",)
    assert cat.start_run("20100101T000000-0000", "sweep") == ("20200101T000000-0000",)


def test_of_two_starts_at_once_one_goes_on(cat, monkeypatch):
    """Both see the same number; the names decide, and who comes second in them stops before it writes a row."""
    listed = cat.location.files
    cat.start_run("b", "sweep")
    folder = next(iter((cat.location.local / starts.STARTS).iterdir())).name
    monkeypatch.setattr(type(cat.location), "files", lambda self, name: [] if name.startswith(starts.STARTS) else listed(name))
    real = starts.marks.write

    def write(location, file, record):
        done = real(location, file, record)
        monkeypatch.undo()
        return done

    monkeypatch.setattr(starts.marks, "write", write)
    with pytest.raises(FencedRun, match=r"00000001\.b\.json"):
        cat.start_run("a", "sweep")
    assert not cat.is_fenced("b") and folder
