"""Immutable Parquet parts: their names, their bytes, and reading them with every byte checked. Knows no catalog and no folder.

A part's name ends in the SHA-256 of its bytes. Parts up to WHOLE_BYTES are read and hashed whole. Larger ones have a companion
with the hash of every block, so that reading two columns of a large part hashes just the blocks that these lie in, its footer
included. Parts with few rows hold their rows a second time as checked lines in the footer: twenty thousand one-row parts are
read without parsing twenty thousand Parquet footers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from catalog import lines, schema
from catalog.errors import DamagedFile
from catalog.locations import Location
from catalog.upgrade import conform, upgrade_table
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
#: Columns that lists and choices read: first in the file, with statistics, so that a selection touches few blocks.
HOT = (
    "device_key", "family_hash", "spec_hash", "status", "reason_code", "target", "shape_bucket", "p50_s", "attempt_no",
    "sequence", "run_id", "sweep_id", "writer_id", "author", "dtype", "created_at", "row_id", "attempt_key", "binary_hash",
    "program_hash",
)  # fmt: skip
_SORTED_BY = [("device_key", "ascending"), ("family_hash", "ascending"), ("shape_bucket", "ascending"), ("status", "descending")]
_VERSION_KEY = b"kernel_farm_schema_version"
_LINES_KEY = b"kernel_farm_lines\x01"
_LINES = re.compile(re.escape(_LINES_KEY) + rb".{2,8}?<(\d+) (\d+)>", re.DOTALL)
_NAME = re.compile(r"([\w-]+)\.([\w-]+)\.(\d{6,})\.s(\d+)\.n(\d+)\.([0-9a-f]{64})\.parquet", re.ASCII)
#: Reading more columns than this beyond the hot ones, it pays to look first which row groups have a match.
_WIDE = 12
_STORED = pa.schema([*schema.SCHEMA, pa.field(KEY_TAG, pa.int64())])
_FORMAT = pads.ParquetFileFormat()


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


# ------------------------------------------------------------------------------------------------------------- writing


def encode(table: pa.Table, *, compacted: bool = False) -> bytes:
    """A table of the schema as the bytes of a part, columns that are all null left out. Compacted parts are sorted, tagged."""
    table = conform(table, schema.SCHEMA)
    if compacted:
        table = table.sort_by(_SORTED_BY)
        table = table.append_column(KEY_TAG, pa.array(map(key_tag, table["attempt_key"].to_pylist()), pa.int64()))
    present = [name for name in table.column_names if table[name].null_count < table.num_rows]
    hot = [name for name in (KEY_TAG, *HOT) if name in present]
    table = table.select(hot + [name for name in present if name not in hot])
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, store_schema=False, compression="zstd", write_statistics=hot) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata({_VERSION_KEY: str(schema.SCHEMA_VERSION).encode()})
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
        raise _damaged(path, "the bytes do not have the hash of its name")
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, f"it is no Parquet file ({error})") from None
    if table.num_rows != name.num_rows:
        raise _damaged(path, f"it has {table.num_rows} rows and not {name.num_rows}")
    few = _few_rows_of(data)
    if few is not None and [json.loads(row)["row_id"] for row in few.rows] != table["row_id"].to_pylist():
        raise _damaged(path, "its lines and its columns differ")


def _damaged(path: str, why: str) -> DamagedFile:
    return DamagedFile(
        f"{path}: damaged: {why}; `farm catalog verify` lists all such files, and a copy or `farm sweep` brings their rows back"
    )


# ------------------------------------------------------------------------------------------------------------- reading


class Part:
    """One part on a location, opened when first read. Every byte that is used has been hashed."""

    def __init__(self, location: Location, file: str, name: PartName, size: int) -> None:
        self.name = name
        self.path = location.at(file)
        self._location = location
        self._file = file
        self._size = size

    @property
    def has_few_rows(self) -> bool:
        return self.name.num_rows <= FEW_ROWS and self._size <= WHOLE_BYTES

    def few_rows(self) -> FewRows:
        """The rows of a part with few, without parsing Parquet. Raises FileNotFoundError, DamagedFile, NewerSchema."""
        few = _few_rows_of(self._whole())
        if few is None:
            raise _damaged(self.path, "it has few rows, and not as lines")
        if few.version > schema.SCHEMA_VERSION:
            raise lines.newer_schema(self.path, few.version)
        return few

    @functools.cached_property
    def fragment(self) -> pads.ParquetFileFragment:
        """The part as a fragment of a dataset, its footer read. Raises FileNotFoundError, DamagedFile, NewerSchema."""
        try:
            fragment = _FORMAT.make_fragment(self._source)
            fragment.ensure_complete_metadata()
        except pa.ArrowException as error:
            raise _damaged(self.path, f"it is no Parquet file ({error})") from None
        if (version := _version(fragment)) > schema.SCHEMA_VERSION:
            raise lines.newer_schema(self.path, version)
        return fragment

    @functools.cached_property
    def _source(self) -> pa.NativeFile:
        return pa.BufferReader(self._whole()) if self._size <= WHOLE_BYTES else pa.PythonFile(_BlockFile(self), mode="r")

    def fragment_with_matches(self, where: pc.Expression) -> pads.ParquetFileFragment | None:
        """The fragment cut down to the row groups that have a matching row, found by reading just the condition's columns."""
        wanted = table_schema(names_in(where))
        likely = self.fragment.subset(where, schema=wanted)
        if not likely.row_groups:
            return None
        file = pq.ParquetFile(self._source, metadata=self.fragment.metadata)
        held = [name for name in wanted.names if name in self.fragment.physical_schema.names]
        table = conform(file.read_row_groups([group.id for group in likely.row_groups], columns=held, use_threads=False), wanted)
        hits = table.append_column("position", pa.array(np.arange(table.num_rows))).filter(where)["position"].to_numpy()
        ends = np.cumsum([group.num_rows for group in likely.row_groups])
        groups = np.unique(np.searchsorted(ends, hits, side="right"))
        return self.fragment.subset(row_group_ids=[likely.row_groups[g].id for g in groups]) if len(groups) else None

    @property
    def is_current(self) -> bool:
        """Whether it has today's columns; an older one has to be read whole, to be upgraded."""
        return _version(self.fragment) == schema.SCHEMA_VERSION

    def check(self) -> None:
        """Reads and checks everything. Raises FileNotFoundError, DamagedFile."""
        verify_bytes(self.name, self._location.read(self._file), self.path)

    def _whole(self) -> bytes:
        data = self._location.read(self._file)
        if digest_bytes(data) != self.name.sha256:
            raise _damaged(self.path, "the bytes do not have the hash of its name")
        return data

    def _blocks(self) -> bytes:
        """The companion's body, made anew where there is none or it is damaged: that takes a look at the whole part."""
        try:
            stored = self._location.read(self._file + BLOCKS_SUFFIX)
        except FileNotFoundError:
            stored = b""
        if hashlib.sha256(stored[:-32]).digest() != stored[-32:] or int.from_bytes(stored[:8], "little") != self._size:
            stored = block_hashes(self._whole())
        return stored[:-32]


@dataclass(frozen=True, slots=True)
class FewRows:
    """The rows of a small part as lines of JSON, and their schema version."""

    rows: tuple[bytes, ...]
    version: int

    def table(self) -> pa.Table:
        return lines.to_table(self.rows, self.version)


def _few_rows_of(data: bytes) -> FewRows | None:
    at = data.rfind(_LINES_KEY)
    match = _LINES.match(data, at) if at >= 0 else None
    if match is None:
        return None
    text = data[match.end() : match.end() + int(match[2])]
    return FewRows(tuple(text.split(b"\n")), int(match[1]))


def _version(fragment: pads.ParquetFileFragment) -> int:
    return int((fragment.metadata.metadata or {}).get(_VERSION_KEY, b"1"))


class _BlockFile(io.RawIOBase):
    """A large part as a file object: whatever is read from it was hashed block by block just before."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._hashes = part._blocks()[8:]
        self._position = 0
        self._last: tuple[int, bytes] = (-1, b"")  # the block that two neighbouring columns share

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._part._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._part._size if size < 0 else min(self._position + size, self._part._size)
        data = self._checked(self._position, end)
        self._position = end
        return data

    def _checked(self, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        held = self._last[1] if self._last[0] == first else b""
        fresh_from = first + bool(held)
        fresh = b""
        if fresh_from <= last:
            fresh = self._part._location.read_range(
                self._part._file, fresh_from * BLOCK_BYTES, (last + 1 - fresh_from) * BLOCK_BYTES
            )
            self._check(fresh_from, fresh)
            self._last = (last, fresh[(last - fresh_from) * BLOCK_BYTES :])
        data = held + fresh if held else fresh
        offset = first * BLOCK_BYTES
        return data[start - offset : end - offset]

    def _check(self, first: int, data: bytes) -> None:
        view = memoryview(data)
        for at in range(0, len(data), BLOCK_BYTES):
            number = first + at // BLOCK_BYTES
            if hashlib.sha256(view[at : at + BLOCK_BYTES]).digest() != self._hashes[number * 32 : number * 32 + 32]:
                raise _damaged(self._part.path, f"block {number} is not what was written")


def read_parts(parts: Sequence[Part], columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
    """Chosen columns of the rows of many parts that satisfy an expression; row groups without such a row are not read."""
    tables = [table_schema(columns).empty_table()]
    with _reading(parts):
        fragments = [part.fragment for part in parts if part.is_current]
        if where is not None and len(set(columns).difference(HOT)) > _WIDE:
            found = [part.fragment_with_matches(where) for part in parts if part.is_current]
            fragments = [fragment for fragment in found if fragment is not None]
        if fragments:
            tables.append(_scan(fragments, columns, where))
        for part in parts:
            if not part.is_current:
                table = upgrade_table(part.fragment.to_table(), _version(part.fragment))
                tables.append((table if where is None else table.filter(where)).select(columns))
    return pa.concat_tables(tables)


def names_in(where: pc.Expression | None) -> tuple[str, ...]:
    """Columns that an expression may refer to; one too many does no harm."""
    text = "" if where is None else str(where)
    return tuple(name for name in _STORED.names if name in text)


def table_schema(columns: Iterable[str]) -> pa.Schema:
    """These columns, the storage column among them, as a schema."""
    return pa.schema([_STORED.field(name) for name in columns])


def _scan(fragments: Sequence[pads.ParquetFileFragment], columns: Sequence[str], where: pc.Expression | None) -> pa.Table:
    options = pads.ParquetFragmentScanOptions(pre_buffer=True)
    known = table_schema(dict.fromkeys([*columns, *names_in(where)]))
    dataset = pads.FileSystemDataset(fragments, known, _FORMAT)
    return dataset.to_table(columns=list(columns), filter=where, fragment_scan_options=options)


@contextlib.contextmanager
def _reading(parts: Sequence[Part]) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        raise _damaged(", ".join(part.path for part in parts[:3]), f"cannot be read ({error})") from None
