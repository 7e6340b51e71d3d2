"""A writer's journal: rows appended one by one, each durable before `append` returns. Makes no Parquet.

A journal is a local file of checked lines, the first of which says whose it is. Its writer holds a lock on it for as long as it
lives, so that anybody can tell a live journal from an orphan.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from catalog import lines, schema
from catalog.errors import DamagedFile, storage_errors
from catalog.locations import make_folder, sync_folder

SUFFIX = ".journal"
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_identifier(text: str) -> bool:
    """Whether a run id or writer id can be a part of a file's name."""
    return _IDENTIFIER.fullmatch(text) is not None


def stem(run_id: str, writer_id: str, counter: int) -> str:
    """What the name of a journal and that of the part made of it have in common."""
    return f"{run_id}.{writer_id}.{counter:06d}"


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What could be read of a journal: its rows as lines of JSON, and the schema version that they have.

    damaged: how many whole lines are not what was written (a torn last line is no damage).
    """

    rows: tuple[bytes, ...] = ()
    version: int = 0
    damaged: int = 0

    def table(self) -> pa.Table:
        """The rows as a table of today's schema."""
        return lines.to_table(self.rows, self.version)

    @property
    def last_sequence(self) -> int:
        """0 when there is no row."""
        return json.loads(self.rows[-1])["sequence"] if self.rows else 0


class JournalWriter:
    """One open journal. The file appears with the first row.

    is_broken: a write failed in a way that leaves the file uncertain; its whole rows count, and no more are to be appended.
    """

    def __init__(self, folder: Path, run_id: str, writer_id: str, counter: int) -> None:
        self.path = folder / (stem(run_id, writer_id, counter) + SUFFIX)
        self.counter = counter
        self.num_rows = 0
        self.num_bytes = 0
        self.is_broken = False
        self._descriptor = -1
        header = {"journal": 1, "schema_version": schema.SCHEMA_VERSION, "run_id": run_id, "writer_id": writer_id}
        self._header = lines.with_checksum(lines.encode(header))

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Writes rows and waits until they are on the disk. Raises StorageError, and then none of them counts as stored."""
        assert not self.is_broken
        data = b"".join(lines.with_checksum(lines.encode(row)) for row in rows)
        with storage_errors("appending rows", str(self.path)):
            if self._descriptor < 0:
                self._open()
            self._write(data)
        self.num_rows += len(rows)

    def close(self) -> None:
        """Gives up the lock. The file stays."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # of a file system that went away; every row was waited for already
                os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        make_folder(self.path.parent)
        while True:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # taken for an orphan, and removed, before we had the lock
        self._write(self._header)
        sync_folder(self.path.parent)

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._undo(error)
            raise
        self.num_bytes += len(data)

    def _undo(self, error: OSError) -> None:
        """Cuts off what a failed write left, so that rows which were reported as not stored do not appear."""
        self.is_broken = error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.num_bytes
        try:
            os.ftruncate(self._descriptor, self.num_bytes)
            os.fsync(self._descriptor)
        except OSError:
            self.is_broken = True


def read(path: Path) -> JournalContents:
    """All whole rows of a journal, live or not. Raises FileNotFoundError, NewerSchema, DamagedFile when the first line is bad."""
    with storage_errors("reading", str(path)):
        data = path.read_bytes()
    whole, _, torn = data.rpartition(b"\n")
    if not whole:
        return JournalContents()  # killed before its first line was whole
    first, *others = whole.split(b"\n")
    header = lines.checked(first)
    if header is None:
        raise DamagedFile(f"{path}: the first line is not what was written; move the file away to go on without its rows")
    if (version := json.loads(header)["schema_version"]) > schema.SCHEMA_VERSION:
        raise lines.newer_schema(str(path), version)
    rows = [lines.checked(line) for line in others if line]
    kept = tuple(row for row in rows if row is not None)
    return JournalContents(kept, version, len(rows) - len(kept))


@contextlib.contextmanager
def orphan_lock(path: Path) -> Iterator[bool]:
    """Holds the journal's lock inside `with`; yields False when its writer is alive (or the lock cannot be had)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = os.fstat(descriptor).st_nlink > 0  # sealed and deleted by another while we waited
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)
