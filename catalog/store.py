"""The catalog as a whole: opening it, writing to it, reading its rows. The work is done in the modules that it names."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from catalog import journal, marks, query, snapshot, starts, writing
from catalog.artifacts import Artifacts
from catalog.errors import CatalogError, DamagedFile, NewerSchema, QueryError, StorageError, first_line
from catalog.filters import Filters, to_expression
from catalog.locations import Location
from catalog.marker import is_catalog, make_catalog
from catalog.query import RESUME_COLUMNS, Resume
from catalog.reading import PartCache, View
from catalog.schema import COLUMNS, SCHEMA
from generator.spec import AttentionSpec

_T = TypeVar("_T")


def open(  # noqa: A001 - the name that users know: catalog.open(uri)
    uri: str | os.PathLike[str] | Location,
    *,
    create: bool = False,
    damaged: Literal["raise", "skip"] = "raise",
    recover: bool = True,
) -> Catalog:
    """The catalog at a local path or URI.

    create: make an empty one where there is none. damaged: what to do about files that are damaged or of a newer schema: raise an
    error that names the first, or leave them out and list them in `Catalog.problems`. recover: seal journals that dead writers
    left, where this location can be written; their rows are read either way.
    Raises LocationError where there is no catalog, StorageError when it cannot be reached.
    """
    location = uri if isinstance(uri, Location) else Location.of(uri)
    with _reachable(location):
        if not is_catalog(location):
            make_catalog(location, create)
        found = Catalog(location, skip_damaged=damaged == "skip")
    if recover:
        with contextlib.suppress(StorageError, DamagedFile, NewerSchema):  # reading says what is wrong, if anything is
            found.recover()
    return found


@contextlib.contextmanager
def _reachable(location: Location) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{location.uri}: cannot be reached ({first_line(error)})") from error


class Catalog:
    """An open catalog. Every query sees what is stored at that moment. Threads may share it."""

    def __init__(self, location: Location, *, skip_damaged: bool = False) -> None:
        self.location = location
        self.artifacts = Artifacts(location)
        self._skip_damaged = skip_damaged
        self._cache = PartCache(location)
        self._seen: View | None = None
        self._records: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"catalog.open({self.uri!r})"

    @property
    def uri(self) -> str:
        return self.location.uri

    @property
    def problems(self) -> tuple[str, ...]:
        """Files that the latest query left out, when opened with damaged="skip"."""
        return tuple(self._seen.problems) if self._seen else ()

    def view(self) -> View:
        """The catalog as it is now. For several queries of one state; the methods below take a fresh one each time."""
        taken = self.snapshot(allow_missing=self._skip_damaged)
        if self._seen is None or self._seen.snapshot.identity != taken.identity:
            self._seen = View(self.location, taken, self._cache, skip_damaged=self._skip_damaged)
        return self._seen

    def strict_view(self) -> View:
        """The same with damage raised always: for work that must not go on without rows, such as deleting what no row names."""
        return View(self.location, self.snapshot(), PartCache(self.location))

    def snapshot(self, *, allow_missing: bool = False) -> snapshot.Snapshot:
        folder = writing.journal_folder(self.location)
        return snapshot.take(self.location, folder, allow_missing=allow_missing, known=self._records)

    def _retrying(self, query: Callable[[View], _T]) -> _T:
        """Runs a query; again on a fresh view when a compaction took a part away under it."""
        for _ in range(10):
            try:
                return query(self.view())
            except FileNotFoundError as error:
                self._seen, gone = None, error
        raise StorageError(
            f"{gone.filename or gone}: listed but not there; is another program deleting files of this catalog?"
        ) from gone

    def rows(self, columns: Iterable[str] | None = None, filters: Filters = None, *, history: bool = False) -> pa.Table:
        """Rows as a table: the latest attempt of each key, rows of live journals among them, revocations filled in.

        columns: names, in the order wanted; None means all. filters: see `catalog.filters`. Both are pushed down: only these
        columns, and only row groups that can match, are read. history: superseded attempts too. Raises QueryError.
        """
        names, where = checked_columns(columns), to_expression(filters)
        return self._retrying(lambda view: view.rows(names, where, history=history))

    def query(
        self, filters: Filters = None, columns: Iterable[str] | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """The same rows as dicts, the newest first: `query("status = 'ok' and p50_s < 1e-3", limit=10)`."""
        names = checked_columns(columns)
        table = self.rows(dict.fromkeys([*names, "sequence", "row_id"]), filters)
        table = table.sort_by([("sequence", "descending"), ("row_id", "ascending")])
        found: list[dict[str, Any]] = table.slice(0, limit).select(names).to_pylist()
        return found

    def best(
        self, spec: AttentionSpec | str, *, device_key: str | None = None, incumbent: str | None = None
    ) -> dict[str, Any] | None:
        """The whole row of the fastest verified kernel for a problem on one device, None where there is none: `query.best`."""
        return query.best(self, spec, device_key=device_key, incumbent=incumbent)

    def sql(self, text: str) -> pa.Table:
        """An SQL query over the tables `rows` and `attempts`: `query.sql`. Needs the extra `sql`."""
        return query.sql(self, text)

    def resume(self) -> Resume:
        """What a rerun need not do again, as of now: `resume().finished(attempt_keys)`."""
        return Resume(self.rows(RESUME_COLUMNS))

    def count(self, filters: Filters = None, *, history: bool = False) -> int:
        return int(self.rows(["attempt_no"], filters, history=history).num_rows)

    def get(self, row_id: str) -> dict[str, Any]:
        """One row by its id or a unique prefix of it; superseded rows are found too. Raises QueryError."""
        prefix = row_id.strip().lower()
        if not prefix or set(prefix) - set("0123456789abcdef"):
            raise QueryError(f"row id: expected hex digits, found {row_id!r}")
        found = self.rows(None, (pc.field("row_id") >= prefix) & (pc.field("row_id") < prefix + "g"), history=True).to_pylist()
        ids = sorted({row["row_id"] for row in found})
        if not ids:
            raise QueryError(f"row id: no row begins with {prefix!r}; `farm catalog list` shows them")
        if len(ids) > 1:
            some = ", ".join(i[:12] for i in ids[:4])
            raise QueryError(f"row id: {prefix!r} is the beginning of {len(ids)} rows ({some}, ...); give more digits")
        latest: dict[str, Any] = max(found, key=lambda row: row["sequence"])
        return latest

    def writer(self, run_id: str, writer_id: str | None = None) -> writing.Writer:
        """A context manager whose `append(row)` makes a row durable. Raises FencedRun when a later run superseded this one."""
        writing.check_fence(self.location, run_id)
        return writing.Writer(self.location, run_id, writing.next_sequence(self.view().snapshot), writer_id)

    def recover(self) -> int:
        """Seals the journals of dead writers; how many there were."""
        folder = writing.journal_folder(self.location)
        if not any(folder.glob(f"*{journal.SUFFIX}")):
            return 0
        return writing.seal_orphans(self.location, self.view().snapshot)

    def fence(self, run_id: str) -> None:
        """Supersedes a run: rows that it has written so far count, whatever it writes from now on is dropped by every reader.

        The first fence of a run holds; another changes nothing.
        """
        if not journal.is_identifier(run_id):
            raise CatalogError(f"run_id: expected 1 to 64 letters, digits, - or _, found {run_id!r}")
        held = self.rows(["writer_id", "sequence"], pc.field("run_id") == run_id, history=True)
        limits = held.group_by("writer_id").aggregate([("sequence", "max")]).to_pylist()
        now = dt.datetime.now(dt.UTC).isoformat()
        fence = marks.Fence(run_id, {row["writer_id"]: row["sequence_max"] for row in limits}, now)
        marks.write(self.location, f"{marks.FENCES}/{run_id}.json", fence)

    def start_run(self, run_id: str, sweep_id: str, where: str = "") -> tuple[str, ...]:
        """Notes a start of a sweep, and fences earlier ones that may still be writing: their run ids (`catalog.starts`)."""
        return starts.take_over(self.location, run_id, sweep_id, where, self.fence)

    def is_fenced(self, run_id: str) -> bool:
        """Whether a later start superseded this run."""
        return starts.is_fenced(self.location, run_id)

    def revoke(self, reason: str, *, row_id: str | None = None, binary_hash: str | None = None) -> int:
        """Takes a row, or all rows of a binary, out of service for good; how many rows. Raises QueryError, CatalogError."""
        if (row_id is None) == (binary_hash is None):
            raise CatalogError("revoke: expected row_id or binary_hash, exactly one of them")
        if not reason.strip():
            raise CatalogError("reason: expected a sentence on why, found an empty text")
        full = self.get(row_id)["row_id"] if row_id is not None else ""
        where = pc.field("row_id") == full if full else pc.field("binary_hash") == binary_hash
        if not (hit := self.count(where, history=True)):
            raise QueryError(f"binary_hash: no row has {binary_hash!r}")
        revocation = marks.Revocation(full, binary_hash or "", reason, dt.datetime.now(dt.UTC).isoformat())
        marks.write(self.location, f"{marks.REVOCATIONS}/{full or binary_hash}.json", revocation)
        return hit

    def record_run(self, run_id: str, sweep_id: str, planned: int, cached: int) -> None:
        """Notes at the end of a run how many attempts it had planned, so that `verify` can hold the rows against it.

        cached: those that earlier runs had finished. A run that was killed has no such note, and nothing is held against it.
        """
        marks.write(self.location, f"{marks.RUNS}/{run_id}.json", marks.RunRecord(run_id, sweep_id, planned, cached))


def checked_columns(columns: Iterable[str] | None) -> Sequence[str]:
    """Names of columns; None means all. Raises QueryError for unknown ones."""
    names = SCHEMA.names if columns is None else list(columns)
    for name in names:
        if name not in COLUMNS:
            raise QueryError(f"{name}: no such column; `farm catalog list --columns` takes any of: {', '.join(COLUMNS)}")
    return names
