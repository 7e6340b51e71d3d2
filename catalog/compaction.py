"""Compaction: many small parts become few large ones, in one step that either holds or never happened. Changes no row.

Superseded attempts go to parts of their own, so that a selection never meets them. The order of steps is what makes it safe to
kill at any point: new parts first (unseen), then the record that makes them count and hides the old ones, then the old files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from catalog import marks, snapshot
from catalog.errors import CatalogError, DamagedFile, storage_errors
from catalog.locations import Location
from catalog.part_files import Part
from catalog.parts import BLOCKS_SUFFIX, PartName, publish
from catalog.reading import PartCache, View
from catalog.schema import SCHEMA
from catalog.snapshot import COMPACTED, ROWS

if TYPE_CHECKING:
    from catalog.store import Catalog

ROWS_PER_PART = 1 << 16
#: A part is written when this many bytes of rows are in memory, however few rows that is.
BYTES_PER_PART = 384 << 20
_LOCK = "compact.lock"


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """parts before and after (journals not counted), rows rewritten into current and history parts, fenced rows dropped."""

    parts_before: int
    parts_after: int
    current_rows: int
    history_rows: int
    fenced_rows: int


def compact(catalog: Catalog, rows_per_part: int = ROWS_PER_PART) -> CompactionReport:
    """Rewrites loose parts, and compacted ones that are small or hold superseded rows, as parts of up to `rows_per_part` rows.

    May be killed at any point and run again; live writers go on. Raises CatalogError while another compaction runs here.
    """
    if rows_per_part < 1:
        raise CatalogError(f"rows_per_part: expected at least 1, found {rows_per_part}")
    with _alone(catalog.location):
        catalog.recover()
        taken = replace(catalog.snapshot(), journals=())  # rows of live journals stay where they are
        view = View(catalog.location, taken, PartCache(catalog.location))
        before = len(taken.loose) + len(taken.compacted) + len(taken.history)
        old = _to_rewrite(view, rows_per_part)
        if not any(old):
            return CompactionReport(before, before, 0, 0, 0)
        builder = _Builder(catalog.location, rows_per_part)
        for current, history in _rows_to_rewrite(view, *old):
            builder.add(current, history)
        builder.finish()
        made = _record(taken, builder, {name for entries in old for name, _ in entries})
        if not marks.commit(catalog.location, made):
            _delete_parts(catalog.location, [*builder.current.names, *builder.history.names])
            raise CatalogError("compact: another compaction of this catalog was faster; nothing was changed")
        _tidy(catalog.location, made)
        return CompactionReport(
            before, len(made.parts) + len(made.history), builder.current.rows, builder.history.rows, view.resolved.fenced
        )


Entries = tuple[tuple[PartName, int], ...]


def _to_rewrite(view: View, rows_per_part: int) -> tuple[Entries, Entries, Entries]:
    """Loose, compacted and history parts that are to be rewritten; all three empty when there is nothing to gain."""
    taken = view.snapshot
    small = tuple(entry for entry in taken.compacted if entry[0].num_rows <= rows_per_part // 2)
    small_history = tuple(entry for entry in taken.history if entry[0].num_rows <= rows_per_part // 2)
    if not taken.loose and len(small) < 2 and len(small_history) < 2:
        return (), (), ()
    dead = view.resolved.dead_keys
    hit = tuple(entry for entry in taken.compacted if entry not in small and len(dead) and view.holds_any(entry, dead))
    return taken.loose, small + hit, small_history


def _rows_to_rewrite(view: View, loose: Entries, compacted: Entries, history: Entries) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Tables of (rows that count, superseded rows), a part or so at a time."""
    nothing = SCHEMA.empty_table()
    resolved = view.resolved
    start = 0
    for table in view.loose_tables() if loose else ():
        latest = resolved.latest.slice(start, table.num_rows)
        superseded = pc.and_not(resolved.allowed.slice(start, table.num_rows), latest)
        start += table.num_rows
        yield table.filter(latest), table.filter(superseded)
    for entry in compacted:
        table = view.table_of(entry)
        dead = pc.is_in(table["attempt_key"], resolved.dead_keys)
        yield table.filter(pc.invert(dead)), table.filter(dead)
    for entry in history:
        yield nothing, view.table_of(entry)


class _Stream:
    """Rows of one kind on their way into parts."""

    def __init__(self, location: Location, writer_id: str, first_counter: int, rows_per_part: int) -> None:
        self.names: list[PartName] = []
        self.rows = 0
        self._location, self._writer_id, self._counter, self._limit = location, writer_id, first_counter, rows_per_part
        self._waiting = SCHEMA.empty_table()

    def add(self, table: pa.Table) -> None:
        self._waiting = pa.concat_tables([self._waiting, table])
        while self._waiting.num_rows >= self._limit or (self._waiting.num_rows and self._waiting.nbytes >= BYTES_PER_PART):
            self._write(min(self._limit, self._waiting.num_rows))

    def finish(self) -> None:
        if self._waiting.num_rows:
            self._write(self._waiting.num_rows)

    def _write(self, num_rows: int) -> None:
        stem = f"{COMPACTED}.{self._writer_id}.{self._counter:06d}"
        self.names.append(publish(self._location, ROWS, stem, self._waiting.slice(0, num_rows), compacted=True))
        self._waiting = self._waiting.slice(num_rows)
        self._counter += 2  # even numbers hold current rows, odd ones history
        self.rows += num_rows


class _Builder:
    """Current and superseded rows, each in parts of its own."""

    def __init__(self, location: Location, rows_per_part: int) -> None:
        writer_id = secrets.token_hex(8)
        self.current = _Stream(location, writer_id, 0, rows_per_part)
        self.history = _Stream(location, writer_id, 1, rows_per_part)

    def add(self, current: pa.Table, history: pa.Table) -> None:
        self.current.add(current)
        self.history.add(history)

    def finish(self) -> None:
        self.current.finish()
        self.history.finish()


def _record(taken: snapshot.Snapshot, builder: _Builder, old: set[PartName]) -> marks.Compaction:
    kept = [str(name) for name, _ in taken.compacted if name not in old]
    kept_history = [str(name) for name, _ in taken.history if name not in old]
    last = [taken.compaction.last_sequence, *(name.last_sequence for name, _ in taken.loose)]
    return marks.Compaction(
        number=taken.compaction.number + 1,
        parts=(*kept, *map(str, builder.current.names)),
        history=(*kept_history, *map(str, builder.history.names)),
        replaced=tuple(sorted({*map(str, old), *taken.compaction.replaced})),
        last_sequence=max(last),
    )


def _tidy(location: Location, made: marks.Compaction) -> None:
    """Deletes what the record hides, then makes a record without the list of hidden parts, which may be long."""
    there = {entry.name for entry in location.files(ROWS)}
    _delete_parts(location, [name for name in made.replaced if name in there])
    if marks.commit(location, replace(made, number=made.number + 1, replaced=())):
        marks.forget_compactions(location, [n for n in marks.compaction_numbers(location) if n <= made.number])


def _delete_parts(location: Location, names: list[PartName] | list[str]) -> None:
    for name in names:
        location.delete(f"{ROWS}/{name}")
        location.delete(f"{ROWS}/{name}{BLOCKS_SUFFIX}")


def drop_damaged(catalog: Catalog) -> tuple[str, ...]:
    """Moves parts that are not whole to `damaged/`, so that the catalog reads again without their rows; gives their names.

    A sweep does the lost attempts again, since no row says any more that they ended.
    """
    with _alone(catalog.location):
        taken = catalog.snapshot(allow_missing=True)
        damaged = [entry for entry in (*taken.loose, *taken.compacted, *taken.history) if not _is_whole(catalog.location, *entry)]
        bad = {str(name) for name, _ in damaged}
        listed = {*taken.compaction.parts, *taken.compaction.history}
        if (bad & listed) or taken.missing:
            gone = bad | set(taken.missing)
            record = replace(
                taken.compaction,
                number=taken.compaction.number + 1,
                parts=tuple(name for name in taken.compaction.parts if name not in gone),
                history=tuple(name for name in taken.compaction.history if name not in gone),
                replaced=tuple(sorted({*taken.compaction.replaced, *(bad & listed)})),
            )
            marks.commit(catalog.location, record)
        for name in sorted(bad):
            catalog.location.replace(f"damaged/{name}", catalog.location.read(f"{ROWS}/{name}"))
        _delete_parts(catalog.location, sorted(bad))
        return tuple(sorted({*bad, *taken.missing}))


def _is_whole(location: Location, name: PartName, size: int) -> bool:
    try:
        Part(location, f"{ROWS}/{name}", name, size).check()
    except DamagedFile:
        return False
    return True


@contextlib.contextmanager
def _alone(location: Location) -> Iterator[None]:
    """One compaction at a time on a local folder. Elsewhere the numbers of the records decide who was first."""
    if location.local is None:
        yield
        return
    path = location.local / _LOCK
    with storage_errors("locking", str(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CatalogError(f"compact: another compaction of {location.uri} is running; wait for it") from None
        yield
    finally:
        os.close(descriptor)


def leftovers(location: Location, taken: snapshot.Snapshot) -> list[str]:
    """Names under rows/ that nothing refers to: parts of killed compactions, and companions without a part."""
    listed = {str(name) for name, _ in (*taken.loose, *taken.compacted, *taken.history)}
    there = [entry.name for entry in location.files(ROWS)]
    parts = [name for name in there if (p := PartName.parse(name)) and p.run_id == COMPACTED and name not in listed]
    companions = [name for name in there if name.endswith(BLOCKS_SUFFIX) and name.removesuffix(BLOCKS_SUFFIX) not in listed]
    return sorted({*parts, *companions, *(name for name in taken.compaction.replaced if name in there)})
