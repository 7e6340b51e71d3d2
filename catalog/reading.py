"""The rows of one snapshot: the latest attempt of each key, fenced rows left out, revocations laid over. Writes nothing."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from catalog import journal, lines, marks
from catalog.errors import CatalogError, DamagedFile, NewerSchema
from catalog.locations import Location
from catalog.part_files import Part, names_in, read_parts
from catalog.parts import KEY_TAG, PartName, key_tag
from catalog.schema import SCHEMA
from catalog.snapshot import ROWS, Snapshot
from verifier.fork_lock import ForkLock
from verifier.records import REASONS

#: What is needed to tell which of two rows of one attempt counts, and whether a row is fenced.
_IDENTITY = ("attempt_key", "attempt_no", "reason_code", "sequence", "run_id", "writer_id", "row_id")
_FINAL = pa.array([reason for reason, kind in REASONS.items() if kind == "final"])
_OVERLAID = {"revoked_at", "revoked_reason"}
_CACHED_PARTS = 512
_CACHED_FEW_ROWS = 100_000


class PartCache:
    """Opened parts and the rows of small ones, kept over the snapshots of a catalog: parts never change. Threads may share it."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = ForkLock()
        self._parts: dict[str, Part] = {}
        self._few: set[str] = set()
        self._few_rows = SCHEMA.empty_table()

    def part(self, name: PartName, size: int) -> Part:
        text = str(name)
        with self._lock:
            part = self._parts.pop(text, None) or Part(self._location, f"{ROWS}/{text}", name, size)
            self._parts[text] = part  # the newest last
            if len(self._parts) > _CACHED_PARTS:
                del self._parts[next(iter(self._parts))]
        return part

    def few_rows(self, parts: Iterable[tuple[PartName, int]], damaged: Callable[[CatalogError], None]) -> pa.Table:
        """All columns of the rows of parts with few; `damaged` is told of those that cannot be read."""
        with self._lock:
            return self._few_rows_of(parts, damaged)

    def _few_rows_of(self, parts: Iterable[tuple[PartName, int]], damaged: Callable[[CatalogError], None]) -> pa.Table:
        parts = list(parts)
        if not self._few <= {str(name) for name, _ in parts}:
            self._few, self._few_rows = set(), SCHEMA.empty_table()
        fresh: dict[int, list[bytes]] = {}
        read = set()
        for name, size in parts:
            if (text := str(name)) not in self._few:
                try:
                    few = Part(self._location, f"{ROWS}/{text}", name, size).few_rows()
                except (DamagedFile, NewerSchema) as error:
                    damaged(error)
                    continue
                fresh.setdefault(few.version, []).extend(few.rows)
                read.add(text)
        tables = [lines.to_table(rows, version) for version, rows in fresh.items()]
        table = pa.concat_tables([self._few_rows, *tables]) if tables else self._few_rows
        if table.num_rows <= _CACHED_FEW_ROWS:
            self._few, self._few_rows = self._few | read, table.combine_chunks()
        return table


@dataclass(frozen=True, slots=True)
class Resolved:
    """Which rows count.

    latest, allowed: masks over the loose rows in reading order: those that count, and those that no fence drops. fenced: how many
    the fences drop. dead_keys: attempts whose row in the compacted parts is superseded by a loose one.
    """

    latest: pa.Array
    allowed: pa.Array
    fenced: int
    dead_keys: pa.Array


class View:
    """Queries over one snapshot. Raises FileNotFoundError when a compaction took a part away meanwhile: take a new snapshot."""

    def __init__(self, location: Location, snapshot: Snapshot, cache: PartCache, *, skip_damaged: bool = False) -> None:
        self.snapshot = snapshot
        self.problems: list[str] = [f"{location.at(ROWS)}/{name}: missing" for name in snapshot.missing]
        self._location = location
        self._cache = cache
        self._skip = skip_damaged
        self._few = {entry: None for entry in snapshot.loose if Part(location, "", *entry).has_few_rows}

    def rows(self, columns: Sequence[str], where: pc.Expression | None = None, *, history: bool = False) -> pa.Table:
        """Chosen columns of the rows that satisfy an expression. history: superseded attempts too."""
        late = bool(self.snapshot.revocations) and not _OVERLAID.isdisjoint(names_in(where))  # parts do not say what is revoked
        reading = None if late else where
        needed = list(dict.fromkeys([*columns, *(names_in(where) if late else ()), *self._overlay_columns()]))
        tables = [self._compacted(needed, reading, history), self._loose_rows(needed, reading, history)]
        table = self._overlay(pa.concat_tables(tables))
        return (table.filter(where) if late else table).select(list(columns))

    def batches(self, columns: Sequence[str], where: pc.Expression | None = None, *, history: bool = False) -> Iterator[pa.Table]:
        """The same rows part by part, for catalogs that do not fit in memory. Filters on revocations are not taken."""
        needed = list(dict.fromkeys([*columns, *self._overlay_columns()]))
        for entry in (*self.snapshot.compacted, *(self.snapshot.history if history else ())):
            yield self._overlay(self._compacted(needed, where, history, [entry])).select(list(columns))
        yield self._overlay(self._loose_rows(needed, where, history)).select(list(columns))

    @functools.cached_property
    def resolved(self) -> Resolved:
        """Which rows count: the last in order of (final after transient, attempt number, sequence, row, writer) of each key."""
        loose = self._loose(_IDENTITY)
        allowed = _allowed(loose, self.snapshot.fences)
        kept = loose.filter(allowed)
        rank = np.flatnonzero(allowed.to_numpy(zero_copy_only=False))
        winners = _last_of_each(kept)
        rivals = self._compacted_rivals(kept["attempt_key"].combine_chunks())
        dead, beaten = _contest(kept.take(pa.array(winners)), rivals)
        latest = np.zeros(loose.num_rows, dtype=bool)
        latest[rank[np.setdiff1d(winners, winners[beaten])]] = True
        return Resolved(pa.array(latest), allowed, loose.num_rows - kept.num_rows, dead)

    def _compacted(
        self,
        columns: Sequence[str],
        where: pc.Expression | None,
        history: bool,
        entries: Sequence[tuple[PartName, int]] | None = None,
    ) -> pa.Table:
        if entries is None:
            entries = self.snapshot.compacted + (self.snapshot.history if history else ())
        dead = pa.array([], pa.string()) if history else self.resolved.dead_keys
        if len(dead):
            alive = ~pc.field("attempt_key").isin(dead)
            where = alive if where is None else where & alive
        return self._read(entries, columns, where)

    def _loose_rows(self, columns: Sequence[str], where: pc.Expression | None, history: bool) -> pa.Table:
        needed = list(dict.fromkeys([*columns, *names_in(where), *(_IDENTITY if history else ())]))
        table = self._loose(needed)
        resolved = self.resolved
        table = _without_copies(table.filter(resolved.allowed)) if history else table.filter(resolved.latest)
        return (table if where is None else table.filter(where)).select(list(columns))

    def _loose(self, columns: Sequence[str]) -> pa.Table:
        """All loose rows, always in the same order."""
        held = self._few_and_live.select(list(columns))
        return pa.concat_tables([held, self._read(self._many, columns, None)]).combine_chunks()

    @functools.cached_property
    def _few_and_live(self) -> pa.Table:
        """Every column of the rows of small parts and of journals."""
        few = self._cache.few_rows(self._few, self._damaged)
        return pa.concat_tables([few, *self._journal_tables()])

    def _journal_tables(self) -> Iterator[pa.Table]:
        for path, _ in self.snapshot.journals:
            try:
                held = journal.read(path)
            except (DamagedFile, NewerSchema) as error:
                self._damaged(error)
                continue
            if held.damaged:
                self.problems.append(f"{path}: {held.damaged} damaged lines")
            yield held.table()

    @functools.cached_property
    def _many(self) -> list[tuple[PartName, int]]:
        """Loose parts with many rows. When damage is to be skipped, those that are whole: a mask over rows needs all or none."""
        entries = [entry for entry in self.snapshot.loose if entry not in self._few]
        return [entry for entry in entries if self._is_whole(*entry)] if self._skip else entries

    def _is_whole(self, name: PartName, size: int) -> bool:
        try:
            self._cache.part(name, size).check()
        except (DamagedFile, NewerSchema) as error:
            self._damaged(error)
            return False
        return True

    def _read(self, entries: Sequence[tuple[PartName, int]], columns: Sequence[str], where: pc.Expression | None) -> pa.Table:
        parts = [self._cache.part(*entry) for entry in entries]
        if not self._skip:
            return read_parts(parts, columns, where)
        tables = [read_parts([], columns)]
        for part in parts:
            try:
                tables.append(read_parts([part], columns, where))
            except (DamagedFile, NewerSchema) as error:
                self._damaged(error)
        return pa.concat_tables(tables)

    def _damaged(self, error: CatalogError) -> None:
        if not self._skip:
            raise error
        if str(error) not in self.problems:
            self.problems.append(str(error))

    def every_row(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Rows of every part and journal: superseded, fenced and doubled ones too."""
        for entry in (*self.snapshot.compacted, *self.snapshot.history):
            yield self._read([entry], columns, None)
        yield self._few_and_live.select(list(columns))
        for entry in self._many:
            yield self._read([entry], columns, None)

    def loose_tables(self) -> Iterator[pa.Table]:
        """All columns of all loose rows, part by part, in the order of the masks of `resolved`."""
        yield self._few_and_live
        for entry in self._many:
            yield self.table_of(entry)

    def table_of(self, entry: tuple[PartName, int]) -> pa.Table:
        """All columns of one part's rows, superseded ones too."""
        return self._read([entry], SCHEMA.names, None)

    def holds_any(self, entry: tuple[PartName, int], keys: pa.Array) -> bool:
        """Whether a compacted part has a row of one of these attempts."""
        return bool(self._read([entry], ["attempt_key"], pc.field("attempt_key").isin(keys)).num_rows)

    def _compacted_rivals(self, keys: pa.Array) -> pa.Table:
        """Rows of the compacted parts that have one of these keys: by the tag first, which is small, then by the key itself."""
        tables = [read_parts([], _IDENTITY)]
        if len(keys):
            tags = np.unique(np.fromiter((key_tag(k) for k in keys.to_pylist()), np.int64, len(keys)))
            for entry in self.snapshot.compacted:
                held = self._read([entry], [KEY_TAG], None)[KEY_TAG].to_numpy()
                if np.isin(held, tags).any():
                    tables.append(self._read([entry], _IDENTITY, pc.field("attempt_key").isin(keys)))
        return pa.concat_tables(tables)

    def _overlay_columns(self) -> tuple[str, ...]:
        return ("row_id", "binary_hash", "revoked_at", "revoked_reason") if self.snapshot.revocations else ()

    def _overlay(self, table: pa.Table) -> pa.Table:
        """Fills in revocations: those of a row's own id, else those of its binary."""
        for key in ("row_id", "binary_hash"):
            held = {getattr(r, key): r for r in self.snapshot.revocations if getattr(r, key)}
            if not held:
                continue
            at = pc.index_in(table[key], pa.array(list(held), pa.string()))
            whens = [dt.datetime.fromisoformat(r.revoked_at) for r in held.values()]
            values = {
                "revoked_at": pa.array(whens, SCHEMA.field("revoked_at").type),
                "revoked_reason": pa.array([r.reason for r in held.values()], pa.string()),
            }
            for name, of_each in values.items():
                column = pc.coalesce(table[name], pc.take(of_each, at))
                table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
        return table


def _allowed(table: pa.Table, fences: Sequence[marks.Fence]) -> pa.Array:
    """Mask of the rows that no fence drops."""
    allowed = pa.array(np.ones(table.num_rows, dtype=bool))
    present = set(pc.unique(table["run_id"]).to_pylist()) if fences else set()
    for fence in (f for f in fences if f.run_id in present):
        within = pa.array(np.zeros(table.num_rows, dtype=bool))
        for writer, limit in fence.limits.items():
            within = pc.or_(within, pc.and_(pc.equal(table["writer_id"], writer), pc.less_equal(table["sequence"], limit)))
        allowed = pc.and_(allowed, pc.or_(pc.not_equal(table["run_id"], fence.run_id), within))
    return allowed.combine_chunks() if isinstance(allowed, pa.ChunkedArray) else allowed


def _order(table: pa.Table) -> list[np.ndarray[Any, Any]]:
    """Keys of np.lexsort, the most important last: a transient ending never displaces a verdict."""
    final = pc.is_in(table["reason_code"], _FINAL).to_numpy()
    ids, writers = (np.asarray(table[name].to_pylist(), dtype=str) for name in ("row_id", "writer_id"))
    return [writers, ids, table["sequence"].to_numpy(), table["attempt_no"].to_numpy(), final]


def _last_of_each(table: pa.Table) -> np.ndarray[Any, Any]:
    """Positions of the row that counts of each attempt key, in rising order."""
    if not table.num_rows:
        return np.array([], dtype=np.int64)
    encoded = table["attempt_key"].combine_chunks().dictionary_encode()
    if len(encoded.dictionary) == table.num_rows:
        return np.arange(table.num_rows)
    codes = encoded.indices.to_numpy()
    order = np.lexsort([*_order(table), codes])
    last = np.append(codes[order][1:] != codes[order][:-1], True)
    return np.sort(order[last])


def _contest(loose: pa.Table, compacted: pa.Table) -> tuple[pa.Array, np.ndarray[Any, Any]]:
    """Loose rows against compacted rows of the same keys: keys whose compacted row loses, and positions of loose rows that do."""
    if not compacted.num_rows:
        return pa.array([], pa.string()), np.array([], dtype=np.int64)
    winners = set(_last_of_each(pa.concat_tables([loose, compacted])).tolist())  # of two equal rows the compacted one stays
    contested = set(compacted["attempt_key"].to_pylist())
    keys = loose["attempt_key"].to_pylist()
    beaten = [i for i, key in enumerate(keys) if key in contested and i not in winners]
    dead = [key for i, key in enumerate(keys) if key in contested and i in winners]
    return pa.array(dead, pa.string()), np.array(beaten, dtype=np.int64)


def _without_copies(table: pa.Table) -> pa.Table:
    """A row that is on its way from a journal into a part may be seen in both."""
    seen: set[tuple[str, str, int]] = set()
    keep = []
    for identity in zip(*(table[n].to_pylist() for n in ("row_id", "writer_id", "sequence")), strict=True):
        keep.append(identity not in seen)
        seen.add(identity)
    return table.filter(pa.array(keep, pa.bool_()))
