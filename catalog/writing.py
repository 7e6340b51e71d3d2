"""Adding rows: a writer's journal, its sealing into parts, the sealing of journals that a dead writer left. Selects nothing."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from catalog import journal, marks
from catalog.errors import CatalogError, FencedRun, StorageError, storage_errors
from catalog.journal import JournalWriter
from catalog.locations import Location
from catalog.parts import PartName, publish
from catalog.schema import COLUMNS, make_row, seal_row
from catalog.snapshot import COMPACTED, JOURNALS, MARKER, ROWS, Snapshot

#: A journal is sealed when it has this many rows, bytes or seconds, whichever comes first, and when its writer closes.
SEAL_ROWS = 1000
SEAL_BYTES = 8 << 20
SEAL_SECONDS = 600.0
_RETRY_SECONDS = 30.0
MERGED = "merged"
_RESERVED = (COMPACTED, MERGED)


def journal_folder(location: Location) -> Path:
    """Where journals lie: in a local catalog; for any other location in this user's state folder, until they are sealed."""
    return location.local / JOURNALS if location.local is not None else state_folder(location, "journals")


def state_folder(location: Location, name: str) -> Path:
    """This user's folder for what belongs to a catalog that lies elsewhere and has to outlive a process here."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "kernel-farm" / name / hashlib.sha256(location.uri.encode()).hexdigest()[:16]


def new_writer_id() -> str:
    """Unlike that of every other writer: host, process and a random part."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:24]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


class Writer:
    """Appends rows of one run. Each is durable when `append` returns, and every reader sees it from then on (on other machines:
    once sealed). Use it in a `with`; threads may share it, processes may not.
    """

    def __init__(self, location: Location, run_id: str, first_sequence: int, writer_id: str | None = None) -> None:
        self.run_id = run_id
        self.writer_id = writer_id or new_writer_id()
        for name, value in (("run_id", run_id), ("writer_id", self.writer_id)):
            if not journal.is_identifier(value) or value in _RESERVED:
                raise CatalogError(
                    f"{name}: expected 1 to 64 letters, digits, - or _ (not {', '.join(_RESERVED)}), found {value!r}"
                )
        self._location = location
        self._sequence = first_sequence
        self._folder = journal_folder(location)
        self._journal = JournalWriter(self._folder, run_id, self.writer_id, 1)
        self._unsealed: list[JournalWriter] = []
        self._opened = time.monotonic()
        self._next_try = 0.0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def append(self, row: Mapping[str, Any]) -> str:
        """Stores one row of `make_row` and gives its row id. Raises RowError, StorageError, FencedRun; then it is not stored."""
        return self.append_all([row])[0]

    def append_all(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Stores several rows with one wait for the disk: all of them or, on an error, none."""
        with self._lock:
            self._usable()
            checked = [row if row.keys() == COLUMNS.keys() else make_row(**row) for row in rows]
            sealed = [
                seal_row(row, run_id=self.run_id, writer_id=self.writer_id, sequence=self._sequence + i)
                for i, row in enumerate(checked)
            ]
            if self._journal.is_broken:
                self._next_journal()
            if not self._journal.num_bytes:
                check_there(self._location)
            self._journal.append(sealed)
            self._sequence += len(sealed)
            if self._is_full():
                self._try_to_seal()
            return [row["row_id"] for row in sealed]

    def seal(self) -> None:
        """Makes a part of the rows so far; later rows go to a new journal."""
        with self._lock:
            self._usable()
            self._seal()

    def close(self) -> None:
        """Seals and gives up the journal. A failure leaves the rows in the journal, where readers find them."""
        with self._lock:
            if not self._closed and os.getpid() == self._pid:
                self._closed = True
                try:
                    self._seal()
                finally:
                    for held in (*self._unsealed, self._journal):
                        held.close()

    def _usable(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise CatalogError("writer: it was closed, or opened by another process; open one with Catalog.writer(run_id)")

    def _is_full(self) -> bool:
        held = self._journal
        big = held.num_rows >= SEAL_ROWS or held.num_bytes >= SEAL_BYTES
        return time.monotonic() >= self._next_try and (big or time.monotonic() - self._opened > SEAL_SECONDS)

    def _try_to_seal(self) -> None:
        """The rows are safe in the journal: when they cannot be sealed now, that is for later."""
        try:
            self._seal()
        except StorageError as error:
            self._next_try = time.monotonic() + _RETRY_SECONDS
            warnings.warn(f"{error}; its rows stay in the journal meanwhile", RuntimeWarning, stacklevel=4)

    def _seal(self) -> None:
        if self._journal.num_rows or self._unsealed:
            check_there(self._location)
            check_fence(self._location, self.run_id)
        if self._journal.num_rows:
            self._next_journal()
        while self._unsealed:
            held = self._unsealed[0]
            seal_journal(self._location, held.path)
            held.close()
            self._unsealed.pop(0)

    def _next_journal(self) -> None:
        """Later rows go to a new journal; the lock of this one is kept until it is sealed."""
        if self._journal.num_rows:
            self._unsealed.append(self._journal)
        else:
            self._journal.close()
        self._journal = JournalWriter(self._folder, self.run_id, self.writer_id, self._journal.counter + 1)
        self._opened = time.monotonic()


def check_there(location: Location) -> None:
    """Raises StorageError where the catalog is gone: where a shared folder is not mounted, none must be made in its place."""
    with storage_errors("looking for the catalog", location.uri):
        if location.exists(MARKER):
            return
    raise StorageError(f"{location.uri}: the catalog is not there now; is its folder mounted? Rows stored before are whole")


def check_fence(location: Location, run_id: str) -> None:
    if location.exists(f"{marks.FENCES}/{run_id}.json"):
        raise FencedRun(f"run_id: {run_id} was superseded by a later start of its sweep; what it writes now is dropped")


def seal_journal(location: Location, path: Path) -> PartName | None:
    """Makes a part of a journal's rows, then removes the journal. The caller holds the journal's lock, or is its writer."""
    held = journal.read(path)
    name = None
    if held.rows:
        name = publish(location, ROWS, path.name.removesuffix(journal.SUFFIX), held.table())
    if held.damaged:
        path.rename(path.with_suffix(".damaged"))  # its good rows are in the part; the rest is for a person to look at
    else:
        path.unlink(missing_ok=True)
    return name


def seal_orphans(location: Location, snapshot: Snapshot) -> int:
    """Seals journals whose writer is gone; how many. Live ones are left alone. Raises the first error after trying them all."""
    sealed = 0
    refused: CatalogError | None = None
    for path in sorted(journal_folder(location).glob(f"*{journal.SUFFIX}")):
        with journal.orphan_lock(path) as orphaned:
            if not orphaned:
                continue
            stem = path.name.removesuffix(journal.SUFFIX)
            if any(name.startswith(f"{stem}.s") for name in snapshot.compaction.replaced):
                path.unlink()  # sealed, and compacted since
            else:
                try:
                    seal_journal(location, path)
                except CatalogError as error:  # the others are none the worse
                    refused = refused or error
                    continue
            sealed += 1
    if refused is not None:
        raise refused
    return sealed


def next_sequence(snapshot: Snapshot) -> int:
    """Above the sequence of every row that the snapshot shows."""
    last = [snapshot.compaction.last_sequence, *(name.last_sequence for name, _ in snapshot.loose)]
    for path, _ in snapshot.journals:
        try:
            last.append(journal.read(path).last_sequence)
        except (FileNotFoundError, CatalogError):
            continue
    return max(last) + 1
