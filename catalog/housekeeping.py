"""Garbage collection and merging of catalogs. Judges no row."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from catalog import marks
from catalog.compaction import leftovers
from catalog.errors import CatalogError
from catalog.locations import TEMPORARY, Location
from catalog.parts import publish
from catalog.schema import ARTIFACT_COLUMNS, SCHEMA
from catalog.snapshot import ROWS, TRANSCRIPTS
from catalog.writing import MERGED, SEAL_ROWS
from generator.canonical import digest

if TYPE_CHECKING:
    from catalog.store import Catalog

#: Files younger than this are left alone: their row, or their record, may be on its way.
GRACE = dt.timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Garbage:
    """What gc deleted, or would: artifacts that no row names, files that killed programs left, and their bytes together."""

    artifacts: tuple[str, ...]
    files: tuple[str, ...]
    num_bytes: int


def collect_garbage(catalog: Catalog, grace: dt.timedelta = GRACE, *, dry_run: bool = False) -> Garbage:
    """Deletes artifacts that no row names (superseded and fenced rows name theirs too) and leftovers, both older than the grace.

    Artifacts are listed before the rows are read, so that one whose row comes meanwhile stays.
    """
    oldest = dt.datetime.now(dt.UTC) - grace
    held = [entry for entry in catalog.artifacts.entries() if entry.modified is not None and entry.modified <= oldest]
    named = referenced_artifacts(catalog)
    artifacts = [entry for entry in held if entry.name not in named]
    left = set(leftovers(catalog.location, catalog.snapshot()))
    files = [
        entry
        for entry in catalog.location.walk("")
        if entry.modified is not None and entry.modified <= oldest and _is_leftover(entry.name, left)
    ]
    if not dry_run:
        for entry in artifacts:
            catalog.artifacts.delete(entry.name)
        for entry in files:
            catalog.location.delete(entry.name)
    total = sum(entry.size for entry in (*artifacts, *files))
    return Garbage(tuple(sorted(e.name for e in artifacts)), tuple(sorted(e.name for e in files)), total)


def _is_leftover(path: str, left: set[str]) -> bool:
    folder, _, name = path.rpartition("/")
    return name.startswith(TEMPORARY) or (folder == ROWS and name in left)


def referenced_artifacts(catalog: Catalog) -> set[str]:
    """Every artifact that any row names, fenced rows among them."""
    named: set[str] = set()
    for table in catalog.strict_view().every_row(ARTIFACT_COLUMNS):
        for column in table.columns:
            named.update(pc.unique(column).drop_null().to_pylist())
    return named


@dataclass(frozen=True, slots=True)
class Merged:
    rows: int
    artifacts: int
    revocations: int
    transcripts: int


def merge(source: Catalog, target: Catalog) -> Merged:
    """Copies into `target` what it lacks of `source`: artifacts first, then rows (superseded ones too), then revocations, then
    what was said to language models and answered, so that it can be replayed there.

    Rows keep their ids, runs and writers. Killed and run again, it goes on; a second time it copies nothing. Raises CatalogError
    for a catalog merged into itself, DamagedFile when a part or artifact of the source is not whole.
    """
    if source.uri == target.uri:
        raise CatalogError(f"merge: expected two catalogs, found {source.uri} twice")
    artifacts = 0
    for name in sorted(referenced_artifacts(source)):
        if source.artifacts.exists(name) and not target.artifacts.exists(name):
            target.artifacts.put(source.artifacts.get(name))
            artifacts += 1
    held = _identities(target.rows(_IDENTITY, history=True))
    rows = 0
    for table in source.strict_view().batches(SCHEMA.names, history=True):
        fresh = table.filter(pc.invert(pc.is_in(_identities(table), held)))
        for at in range(0, fresh.num_rows, SEAL_ROWS):
            _add_part(target.location, fresh.slice(at, SEAL_ROWS))
        rows += fresh.num_rows
    return Merged(rows, artifacts, _copy_revocations(source.location, target.location), _copy_transcripts(source, target))


_IDENTITY = ["row_id", "writer_id", "sequence"]


def _identities(table: pa.Table) -> pa.Array:
    """What tells a row from every other, as one text each."""
    texts = (table[name].cast(pa.string()) for name in _IDENTITY)
    return pc.binary_join_element_wise(*texts, " ").combine_chunks()


def _add_part(location: Location, table: pa.Table) -> None:
    """A part whose name follows from its rows, so that the same rows make the same part. Revocations stay out of the columns."""
    for name in ("revoked_at", "revoked_reason"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.nulls(table.num_rows, table.schema.field(at).type))
    writer_id = digest(table.select(_IDENTITY).to_pylist())[:16]
    publish(location, ROWS, f"{MERGED}.{writer_id}.000001", table)


def _copy_transcripts(source: Catalog, target: Catalog) -> int:
    """Answers and what was said to them; not the marks of tries: nobody in `target` waits for those. The first answer stays."""
    copied = 0
    for kind in ("answers", "feedback"):
        names = [f"{TRANSCRIPTS}/{kind}/{entry.name}" for entry in source.location.files(f"{TRANSCRIPTS}/{kind}")]
        for name in sorted(names):
            copied += not target.location.exists(name) and target.location.put_new(name, source.location.read(name))
    return copied


def _copy_revocations(source: Location, target: Location) -> int:
    revocations: Iterable[marks.Revocation] = marks.read_all(source, marks.REVOCATIONS, marks.Revocation)
    return sum(marks.write(target, f"{marks.REVOCATIONS}/{r.row_id or r.binary_hash}.json", r) for r in revocations)
