"""Rows as checked lines of text: the form of journals and of parts with few rows. Knows no file."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from catalog import schema
from catalog.errors import NewerSchema
from catalog.schema import COLUMNS, SCHEMA

_TIMES = tuple(name for name, column in COLUMNS.items() if pa.types.is_timestamp(column.type))
_NONE = SCHEMA.empty_table()
_DIGITS = 16  # of the checksum at the start of a line


def encode(record: Mapping[str, Any]) -> bytes:
    """One line: 16 hex digits of the SHA-256 of the JSON, a blank, the JSON, a line end. Columns that are None are left out."""
    plain = {
        name: value.isoformat() if isinstance(value, dt.datetime) else value
        for name, value in record.items()
        if value is not None
    }
    body = json.dumps(plain, separators=(",", ":")).encode()
    return _checksum(body) + b" " + body + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line without its line end; None when the line is not whole or not what was written."""
    if line[_DIGITS : _DIGITS + 1] != b" " or _checksum(line[_DIGITS + 1 :]) != line[:_DIGITS]:
        return None
    record: dict[str, Any] = json.loads(line[_DIGITS + 1 :])
    return record


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:_DIGITS].encode()


def to_table(records: Iterable[dict[str, Any]]) -> pa.Table:
    """Records of rows, of today's schema, as a table with every column."""
    rows = list(records)
    if not rows:
        return _NONE
    for row in rows:
        for name in _TIMES:
            if isinstance(row.get(name), str):
                row[name] = dt.datetime.fromisoformat(row[name])
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def newer_schema(source: str, version: int) -> NewerSchema:
    known = schema.SCHEMA_VERSION
    return NewerSchema(f"{source}: has schema version {version}, this program reads up to {known}; update kernel-farm here")
