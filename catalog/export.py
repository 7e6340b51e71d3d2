"""Rows as a file of another kind (CSV, JSON, Parquet), with the artifacts of those rows beside it. Changes no catalog."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from catalog.errors import CatalogError
from catalog.locations import Location
from catalog.schema import ARTIFACT_COLUMNS

if TYPE_CHECKING:
    from catalog.store import Catalog

FORMATS = ("csv", "json", "jsonl", "parquet")


def export(
    catalog: Catalog,
    path: Path,
    *,
    columns: Iterable[str] | None = None,
    filters: Any = None,
    artifacts: Path | None = None,
    form: str = "",
) -> tuple[int, int]:
    """Writes the chosen rows to `path`, whole or not at all; gives the numbers of rows and of artifacts.

    form: one of FORMATS, by default the path's suffix. CSV holds lists as JSON text. artifacts: a folder that gets a copy of
    every artifact that those rows name, checked, under its hash. Raises CatalogError, QueryError, DamagedFile, StorageError.
    """
    form = form or path.suffix.lstrip(".").lower()
    if form not in FORMATS:
        raise CatalogError(f"format: expected one of {', '.join(FORMATS)} (or a file name that ends so), found {form!r}")
    if columns is not None and not (columns := tuple(dict.fromkeys(columns))):
        raise CatalogError("columns: expected at least one name, found none")
    table = catalog.rows(columns, filters)
    copied = _copy_artifacts(catalog, filters, artifacts) if artifacts is not None else 0
    Location.of(path.absolute().parent).replace(path.name, _encode(table, form))
    return table.num_rows, copied


def _encode(table: pa.Table, form: str) -> bytes:
    sink = io.BytesIO()
    match form:
        case "csv":
            pacsv.write_csv(_flat(table), sink)
        case "parquet":
            pq.write_table(table, sink, compression="zstd")
        case "json":
            sink.write(json.dumps(table.to_pylist(), default=_plain, indent=1).encode() + b"\n")
        case _:
            sink.writelines(json.dumps(row, default=_plain).encode() + b"\n" for row in table.to_pylist())
    return sink.getvalue()


def _plain(value: Any) -> str:
    text: str = value.isoformat()  # times are the only values of rows that JSON does not know
    return text


def _flat(table: pa.Table) -> pa.Table:
    """Lists as JSON text: CSV has no other place for them."""
    for at, column in enumerate(table.schema):
        if pa.types.is_list(column.type):
            texts = [None if value is None else json.dumps(value) for value in table[column.name].to_pylist()]
            table = table.set_column(at, pa.field(column.name, pa.string()), pa.array(texts, pa.string()))
    return table


def _copy_artifacts(catalog: Catalog, filters: Any, folder: Path) -> int:
    named: set[str] = set()
    for column in catalog.rows(ARTIFACT_COLUMNS, filters).columns:
        named.update(column.drop_null().to_pylist())
    target = Location.of(folder)
    held = sorted(name for name in named if catalog.artifacts.exists(name))
    for name in held:
        target.replace(name, catalog.artifacts.get(name))
    return len(held)
