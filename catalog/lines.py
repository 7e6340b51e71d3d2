"""Rows as lines of JSON: the form of journals (each line with a checksum) and of parts with few rows. Knows no file."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.json as pajson

from catalog import schema
from catalog.errors import NewerSchema
from catalog.upgrade import upgrade_record

_NONE = schema.SCHEMA.empty_table()
_PARSE = pajson.ParseOptions(explicit_schema=schema.SCHEMA, unexpected_field_behavior="ignore")
_BLOCK_BYTES = 16 << 20  # a line is no longer than this
_DIGITS = 16  # of the checksum at the start of a journal's line


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as one line of ASCII JSON without its line end; columns that are None are left out."""
    plain = {
        name: value.isoformat() if isinstance(value, dt.datetime) else value
        for name, value in record.items()
        if value is not None
    }
    return json.dumps(plain, separators=(",", ":")).encode()


def with_checksum(line: bytes) -> bytes:
    """16 hex digits of its SHA-256, a blank, the line, a line end."""
    return _checksum(line) + b" " + line + b"\n"


def checked(text: bytes) -> bytes | None:
    """The line in a text that `with_checksum` made, its line end cut off; None when that is not what was written."""
    line = text[_DIGITS + 1 :]
    return line if text[:_DIGITS] == _checksum(line) and text[_DIGITS : _DIGITS + 1] == b" " else None


def _checksum(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest()[:_DIGITS].encode()


def to_table(rows: Sequence[bytes], version: int) -> pa.Table:
    """Lines of rows of one schema version as a table of today's schema, in their order."""
    if not rows:
        return _NONE
    if version == schema.SCHEMA_VERSION:
        text = pa.BufferReader(b"\n".join(rows) + b"\n")
        return pajson.read_json(text, pajson.ReadOptions(block_size=_BLOCK_BYTES), _PARSE)
    records = [upgrade_record(json.loads(row)) for row in rows]
    for name in schema.TIME_COLUMNS:
        for record in records:
            if record.get(name) is not None:
                record[name] = dt.datetime.fromisoformat(record[name])
    return pa.Table.from_pylist(records, schema=schema.SCHEMA)


def newer_schema(source: str, version: int) -> NewerSchema:
    known = schema.SCHEMA_VERSION
    return NewerSchema(f"{source}: has schema version {version}, this program reads up to {known}; update kernel-farm here")
