"""Folders of temporary files: gone with their owner, or with the next start where it was killed; never while one is held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verifier.own_folder import OwnFolder, own_folder, remove_abandoned

HOLD = """
import sys
from verifier.own_folder import OwnFolder
held = OwnFolder("test", sys.argv[1])
print(held.path, flush=True)
input()
"""


def holder(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that holds a folder."""
    argv = [sys.executable, "-c", HOLD, str(parent)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_it_is_there_as_long_as_its_block(tmp_path: Path) -> None:
    with own_folder("test", tmp_path) as folder:
        (folder / "deep").mkdir()
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_what_a_killed_owner_left_the_next_start_removes_and_nothing_that_is_held(tmp_path: Path) -> None:
    mine = OwnFolder("test", tmp_path)
    killed, left = holder(tmp_path)
    living, held = holder(tmp_path)
    (left / "kernel.bin").write_bytes(b"x")
    (other := tmp_path / "farm-another-1").mkdir()
    killed.kill()
    killed.wait()
    third, fresh = holder(tmp_path)
    assert not left.exists() and all(Path(p).is_dir() for p in (mine.path, held, fresh, other))
    for process in (living, third):
        process.communicate("\n")
    mine.close()


def test_one_that_is_being_made_is_left_alone_for_a_minute(tmp_path: Path) -> None:
    (fresh := tmp_path / ".farm-test-1").mkdir()
    remove_abandoned("test", tmp_path)
    assert fresh.exists()
    os.utime(fresh, (1, 1))
    remove_abandoned("test", tmp_path)
    assert not fresh.exists()


def test_where_no_lock_can_be_had_nothing_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with own_folder("test", tmp_path) as folder:
        remove_abandoned("test", tmp_path)
        assert folder.is_dir()
