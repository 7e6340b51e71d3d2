"""Many writers: processes and threads at once, writers that die at any moment, binaries written by several."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from catalog_rows import attempt, keys_of, part_files, sha

import catalog
from catalog import writing
from catalog.errors import CatalogError

SPAWN = multiprocessing.get_context("spawn")


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


def test_a_writer_belongs_to_one_process_and_ends_once(cat):
    writer = cat.writer("r1")
    writer.close()
    writer.close()
    with pytest.raises(CatalogError, match="it was closed"):
        writer.append(attempt(1))
    for run in ("", "a b", "../x", "compacted", "x" * 65):
        with pytest.raises(CatalogError, match="run_id: expected 1 to 64"):
            cat.writer(run)


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
