"""Immutable Parquet parts: their names and their bytes, and writing them. Reading them is in catalog/part_files.py.

A part's name ends in the SHA-256 of its bytes. Parts up to WHOLE_BYTES are read and hashed whole. Larger ones have a companion
with the hash of every block, so that reading two columns of a large part hashes just the blocks that these lie in, its footer
included. Parts with few rows hold their rows a second time as checked lines in the footer: twenty thousand one-row parts are
read without parsing twenty thousand Parquet footers.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from catalog import lines, schema
from catalog.errors import DamagedFile
from catalog.locations import Location
from catalog.upgrade import conform
from generator.canonical import digest_bytes

SUFFIX = ".parquet"
BLOCKS_SUFFIX = ".blocks"
#: Parts of at most this many rows carry them as lines too.
FEW_ROWS = 64
#: Parts of at most this many bytes are read whole.
WHOLE_BYTES = 1 << 18
BLOCK_BYTES = 1 << 16
#: Small enough that one whole row is read in a few milliseconds, large enough that footers stay small.
ROW_GROUP_ROWS = 1 << 12

#: Storage column of compacted parts: the first 15 hex digits of attempt_key as a number, for quick look-ups of duplicates.
KEY_TAG = "key_tag"
#: Columns that lists and choices read: first in the file and with statistics, so that a selection touches few blocks. Those whose
#: values repeat come first, since they take little room.
HOT = (
    "device_key", "status", "family_hash", "shape_bucket", "spec_hash", "reason_code", "target", "dtype", "author", "run_id",
    "sweep_id", "writer_id", "attempt_no", "num_heads", "batch", "seqlen_q", "seqlen_k", "throttle_flags", "plausible",
    "revoked_at", "binary_hash", "program_hash", "sequence", "created_at", "p50_s", "p20_s", "p80_s", "ci_low_s", "ci_high_s",
    "ratio_p50", "row_id", "attempt_key",
)  # fmt: skip
_SORTED_BY = [("device_key", "ascending"), ("status", "descending"), ("family_hash", "ascending"), ("shape_bucket", "ascending")]
VERSION_KEY = b"kernel_farm_schema_version"
_LINES_KEY = b"kernel_farm_lines\x01"
_LINES = re.compile(re.escape(_LINES_KEY) + rb".{2,8}?<(\d+) (\d+)>", re.DOTALL)
_NAME = re.compile(r"([\w-]+)\.([\w-]+)\.(\d{6,})\.s(\d+)\.n(\d+)\.([0-9a-f]{64})\.parquet", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """What a part's name says: who wrote it, its counter, its largest sequence, how many rows, the hash of its bytes."""

    run_id: str
    writer_id: str
    counter: int
    last_sequence: int
    num_rows: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.stem}.s{self.last_sequence}.n{self.num_rows}.{self.sha256}{SUFFIX}"

    @property
    def stem(self) -> str:
        """The same as that of the journal it was made of."""
        return f"{self.run_id}.{self.writer_id}.{self.counter:06d}"

    @staticmethod
    def parse(text: str) -> PartName | None:
        """None for any other file."""
        match = _NAME.fullmatch(text)
        return PartName(match[1], match[2], int(match[3]), int(match[4]), int(match[5]), match[6]) if match else None


def key_tag(attempt_key: str) -> int:
    return int(attempt_key[:15], 16)


def tagged(table: pa.Table) -> pa.Table:
    return table.append_column(KEY_TAG, pa.array(map(key_tag, table["attempt_key"].to_pylist()), pa.int64()))


def encode(table: pa.Table, *, compacted: bool = False) -> bytes:
    """A table of the schema as the bytes of a part, columns that are all null left out. Compacted parts are sorted, tagged."""
    table = conform(table, schema.SCHEMA)
    if compacted:
        table = table.sort_by(_SORTED_BY)
        table = tagged(table)
    present = [name for name in table.column_names if table[name].null_count < table.num_rows]
    hot = [name for name in (KEY_TAG, *HOT) if name in present]
    table = table.select(hot + [name for name in present if name not in hot])
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, store_schema=False, compression="zstd", write_statistics=hot) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata({VERSION_KEY: str(schema.SCHEMA_VERSION).encode()})
        if table.num_rows <= FEW_ROWS and not compacted:
            writer.add_key_value_metadata({_LINES_KEY: _pack(table.to_pylist())})
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _pack(rows: list[dict[str, Any]]) -> bytes:
    """<schema version, length> and the rows as lines: ASCII without control characters, so that none holds the key."""
    text = b"\n".join(map(lines.encode, rows))
    return b"<%d %d>%b" % (schema.SCHEMA_VERSION, len(text), text)


def publish(location: Location, folder: str, stem: str, table: pa.Table, *, compacted: bool = False) -> PartName:
    """Writes a part under its final name once its bytes were read back and found whole. One that is there already is kept."""
    data = encode(table, compacted=compacted)
    run_id, writer_id, counter = stem.split(".")
    last = pc.max(table["sequence"]).as_py() or 0
    name = PartName(run_id, writer_id, int(counter), last, table.num_rows, digest_bytes(data))
    if len(data) > WHOLE_BYTES:
        location.put_new(f"{folder}/{name}{BLOCKS_SUFFIX}", block_hashes(data))

    def check(stored: bytes) -> None:
        verify_bytes(name, stored, location.at(f"{folder}/{name}"))

    location.put_new(f"{folder}/{name}", data, check)
    return name


def block_hashes(data: bytes) -> bytes:
    """The companion of a large part: its size (8 bytes), the SHA-256 of each block, and the SHA-256 of all that."""
    view = memoryview(data)
    hashes = b"".join(hashlib.sha256(view[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES))
    body = len(data).to_bytes(8, "little") + hashes
    return body + hashlib.sha256(body).digest()


def verify_bytes(name: PartName, data: bytes, path: str) -> None:
    """Everything about a part's bytes: hash, Parquet, number of rows, and that its lines tell the same. Raises DamagedFile."""
    if digest_bytes(data) != name.sha256:
        raise damaged(path, "the bytes do not have the hash of its name")
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, f"it is no Parquet file ({error})") from None
    if table.num_rows != name.num_rows:
        raise damaged(path, f"it has {table.num_rows} rows and not {name.num_rows}")
    few = few_rows_of(data)
    if few is not None and [json.loads(row)["row_id"] for row in few.rows] != table["row_id"].to_pylist():
        raise damaged(path, "its lines and its columns differ")


def damaged(path: str, why: str) -> DamagedFile:
    return DamagedFile(
        f"{path}: damaged: {why}; `farm catalog verify` lists all such files, and a copy or `farm sweep` brings their rows back"
    )


@dataclass(frozen=True, slots=True)
class FewRows:
    """The rows of a small part as lines of JSON, and their schema version."""

    rows: tuple[bytes, ...]
    version: int

    def table(self) -> pa.Table:
        return lines.to_table(self.rows, self.version)


def few_rows_of(data: bytes) -> FewRows | None:
    at = data.rfind(_LINES_KEY)
    match = _LINES.match(data, at) if at >= 0 else None
    if match is None:
        return None
    text = data[match.end() : match.end() + int(match[2])]
    return FewRows(tuple(text.split(b"\n")), int(match[1]))
