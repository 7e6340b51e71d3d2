"""How rows of an older schema read as today's: one literal entry for each version that was left behind. Rewrites no file.

A column that is new and unknown for old rows needs no entry: it reads as null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from catalog import schema


@dataclass(frozen=True, slots=True)
class Upgrade:
    """From a version to the next. renamed: old name -> new name. filled: new column -> what every old row has in it."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    filled: Mapping[str, Any] = field(default_factory=dict)


#: Version that is left behind -> how to read it as the next one.
UPGRADES: dict[int, Upgrade] = {}


def upgrade_record(record: dict[str, Any]) -> dict[str, Any]:
    """One row as a dict; its own `schema_version` says where it starts."""
    for version in range(record.get("schema_version", schema.SCHEMA_VERSION), schema.SCHEMA_VERSION):
        step = UPGRADES.get(version, Upgrade())
        record = {**step.filled, **{step.renamed.get(name, name): value for name, value in record.items()}}
    return record


def upgrade_table(table: pa.Table, version: int) -> pa.Table:
    """A whole part of that version as a table of today's schema."""
    for old in range(version, schema.SCHEMA_VERSION):
        step = UPGRADES.get(old, Upgrade())
        table = table.rename_columns([step.renamed.get(name, name) for name in table.column_names])
        for name, value in step.filled.items():
            table = table.append_column(name, pa.repeat(pa.scalar(value, schema.SCHEMA.field(name).type), table.num_rows))
    return conform(table, schema.SCHEMA)


def conform(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The columns of `wanted`, in its order: cast where the type differs, null where there is none, others dropped."""
    held = set(table.column_names)
    columns = [
        table[f.name].cast(f.type) if f.name in held else pa.chunked_array([pa.nulls(table.num_rows, f.type)]) for f in wanted
    ]
    return pa.table(columns, schema=wanted)
