"""Reading parts: only the columns and row groups that a query needs, every byte of them hashed just before. Writes nothing.

Reading happens on threads of Python that end before a call returns, never on those of Arrow: these could still hold a Python file
when the interpreter ends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from catalog import lines, schema
from catalog import parts as layout
from catalog.locations import Location, RangeReader
from catalog.parts import (
    BLOCKS_SUFFIX,
    HOT,
    KEY_TAG,
    VERSION_KEY,
    FewRows,
    PartName,
    block_hashes,
    damaged,
    few_rows_of,
    verify_bytes,
)
from catalog.upgrade import conform, upgrade_table
from generator.canonical import digest_bytes

#: Reading more columns than this beyond the hot ones, it pays to look first which row groups have a match.
_WIDE = 12
#: Fewer rows than this are read on the calling thread.
_ROWS_FOR_THREADS = 200_000
_STORED = pa.schema([*schema.SCHEMA, pa.field(KEY_TAG, pa.int64())])
_FORMAT = pads.ParquetFileFormat()


def read_parts(parts: Sequence[Part], columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
    """Chosen columns of the rows of many parts that satisfy an expression; row groups without such a row are not read."""
    tables = [table_schema(columns).empty_table()]
    if sum(part.name.num_rows for part in parts) < _ROWS_FOR_THREADS or len(parts) < 2:
        tables += [part.read(columns, where) for part in parts]
    else:
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1, 8)) as pool:
            tables += pool.map(lambda part: part.read(columns, where), parts)
    return pa.concat_tables(tables)


def names_in(where: pc.Expression | None) -> tuple[str, ...]:
    """Columns that an expression refers to (and perhaps one that a text in it is named like)."""
    words = set() if where is None else set(re.findall(r"\w+", str(where)))
    return tuple(name for name in _STORED.names if name in words)


def table_schema(columns: Iterable[str]) -> pa.Schema:
    """These columns, the storage column among them, as a schema."""
    return pa.schema([_STORED.field(name) for name in columns])


class Part:
    """One part on a location, opened when first read. Threads may share it."""

    def __init__(self, location: Location, file: str, name: PartName, size: int) -> None:
        self.name = name
        self.path = location.at(file)
        self.size = size
        self._location = location
        self._file = file

    @property
    def has_few_rows(self) -> bool:
        return self.name.num_rows <= layout.FEW_ROWS and self._is_small

    @property
    def _is_small(self) -> bool:
        return self.size <= layout.WHOLE_BYTES

    def few_rows(self) -> FewRows:
        """The rows of a part with few, without parsing Parquet. Raises FileNotFoundError, DamagedFile, NewerSchema."""
        few = few_rows_of(self._whole())
        if few is None:
            raise damaged(self.path, "it has few rows, and not as lines")
        if few.version > schema.SCHEMA_VERSION:
            raise lines.newer_schema(self.path, few.version)
        return few

    def read(self, columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
        """Chosen columns of the rows that satisfy an expression. Raises FileNotFoundError, DamagedFile, NewerSchema."""
        with self._parsing():
            if self.version != schema.SCHEMA_VERSION:
                table = upgrade_table(self._file_on_disk.read(use_threads=False), self.version)
                if layout.KEY_TAG in columns:  # of the file, not of the schema: an upgrade leaves it out
                    table = layout.tagged(table)
            elif groups := self._groups_for(columns, where):
                table = self._read_groups(groups, dict.fromkeys([*columns, *names_in(where)]))
            else:
                return table_schema(columns).empty_table()
            return (table if where is None else table.filter(where)).select(list(columns))

    def check(self) -> None:
        """Reads and checks everything. Raises FileNotFoundError, DamagedFile, NewerSchema."""
        verify_bytes(self.name, self._location.read(self._file), self.path)
        _ = self.version

    @property
    def version(self) -> int:
        """The schema version of its rows. Raises NewerSchema."""
        version = int((self._footer.metadata.metadata or {}).get(VERSION_KEY, b"1"))
        if version > schema.SCHEMA_VERSION:
            raise lines.newer_schema(self.path, version)
        return version

    @functools.cached_property
    def _footer(self) -> pads.ParquetFileFragment:
        """The footer as a fragment, which tells row groups by their statistics. It has the end of the file only."""
        with self._parsing():
            tail = self._whole() if self._is_small else self._blocks().tail()
            fragment = _FORMAT.make_fragment(pa.BufferReader(tail))
            fragment.ensure_complete_metadata()
            return fragment

    @property
    def _file_on_disk(self) -> pq.ParquetFile:
        source = pa.BufferReader(self._whole()) if self._is_small else pa.PythonFile(self._blocks(), mode="r")
        return pq.ParquetFile(source, metadata=self._footer.metadata, pre_buffer=False)

    def _groups_for(self, columns: Sequence[str], where: pc.Expression | None) -> list[int]:
        """Row groups that may have a matching row; for a wide selection, those that have one."""
        if where is None:
            return list(range(self._footer.metadata.num_row_groups))
        names = names_in(where)
        likely = self._footer.subset(where, schema=table_schema(names)).row_groups
        if not likely or len(set(columns).difference(HOT)) <= _WIDE:
            return [group.id for group in likely]
        table = self._read_groups([group.id for group in likely], names)
        hits = table.append_column("position", pa.array(np.arange(table.num_rows))).filter(where)["position"].to_numpy()
        ends = np.cumsum([group.num_rows for group in likely])
        return [likely[g].id for g in np.unique(np.searchsorted(ends, hits, side="right"))]

    def _read_groups(self, groups: Sequence[int], columns: Iterable[str]) -> pa.Table:
        """Whole row groups; columns that the file lacks are null."""
        wanted = table_schema(columns)
        held = [name for name in wanted.names if name in self._footer.physical_schema.names]
        if not held:
            num_rows = sum(self._footer.metadata.row_group(g).num_rows for g in groups)
            return pa.table([pa.nulls(num_rows, field.type) for field in wanted], schema=wanted)
        return conform(self._file_on_disk.read_row_groups(list(groups), columns=held, use_threads=False), wanted)

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        """What Arrow cannot parse is damage: nothing else wrote this file."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.path, f"it cannot be read as Parquet ({error})") from None

    def _whole(self) -> bytes:
        data = self._location.read(self._file)
        if digest_bytes(data) != self.name.sha256:
            raise damaged(self.path, "the bytes do not have the hash of its name")
        return data

    def _blocks(self) -> BlockFile:
        return BlockFile(self.path, self.size, self._hashes, self._location.open_ranges(self._file))

    @functools.cached_property
    def _hashes(self) -> bytes:
        """The hash of every block, of its companion; of the whole part, checked, where that is lost or damaged."""
        try:
            stored = self._location.read(self._file + BLOCKS_SUFFIX)
        except FileNotFoundError:
            stored = b""
        if hashlib.sha256(stored[:-32]).digest() != stored[-32:] or int.from_bytes(stored[:8], "little") != self.size:
            stored = block_hashes(self._whole())
        return stored[8:-32]


class BlockFile(io.RawIOBase):
    """A large part as a file object: whatever is read from it was hashed block by block just before."""

    def __init__(self, path: str, size: int, hashes: bytes, reader: RangeReader) -> None:
        self._path, self._size, self._hashes, self._reader = path, size, hashes, reader
        self._position = 0
        self._last: tuple[int, bytes] = (-1, b"")  # the block that two neighbouring columns share

    def tail(self) -> bytes:
        """The end of the file with all of the footer in it."""
        end = self._checked(max(0, self._size - layout.BLOCK_BYTES), self._size)
        needed = int.from_bytes(end[-8:-4], "little") + 8
        return end if needed <= len(end) else self._checked(max(0, self._size - needed), self._size)

    def close(self) -> None:
        self._reader.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._position + size, self._size)
        data = self._checked(self._position, end)
        self._position = end
        return data

    def _checked(self, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        first, last = start // layout.BLOCK_BYTES, (end - 1) // layout.BLOCK_BYTES
        held = self._last[1] if self._last[0] == first else b""
        fresh_from = first + bool(held)
        fresh = b""
        if fresh_from <= last:
            fresh = self._reader.read(fresh_from * layout.BLOCK_BYTES, (last + 1 - fresh_from) * layout.BLOCK_BYTES)
            self._check(fresh_from, fresh)
            self._last = (last, fresh[(last - fresh_from) * layout.BLOCK_BYTES :])
        data = held + fresh if held else fresh
        offset = first * layout.BLOCK_BYTES
        return data[start - offset : end - offset]

    def _check(self, first: int, data: bytes) -> None:
        view = memoryview(data)
        for at in range(0, len(data), layout.BLOCK_BYTES):
            number = first + at // layout.BLOCK_BYTES
            if hashlib.sha256(view[at : at + layout.BLOCK_BYTES]).digest() != self._hashes[number * 32 : number * 32 + 32]:
                raise damaged(self._path, f"block {number} is not what was written")
