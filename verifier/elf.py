"""What a 64-bit little-endian ELF file says of itself: imports, functions, what runs on loading. Not a disassembler.

Shared objects and cubins are such files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

#: Kinds of sections, as the ELF specification names and numbers them.
_SHT_SYMTAB, _SHT_DYNAMIC, _SHT_DYNSYM = 2, 6, 11
#: Sections whose functions a loader calls by itself: SHT_INIT_ARRAY, SHT_FINI_ARRAY, SHT_PREINIT_ARRAY.
_SHT_CALLED = (14, 15, 16)
#: Entries of the dynamic section that name such functions: DT_INIT, DT_FINI, and the tables' own.
_DT_CALLED = (12, 13, 25, 26, 32)
_STT_FUNC = 2


def imports_of(data: bytes) -> tuple[str, ...]:
    """Undefined dynamic symbols, sorted. Raises ValueError for anything but a 64-bit little-endian ELF file."""
    return tuple(sorted({name for name, _, section in _symbols(data, _SHT_DYNSYM) if section == 0}))


def functions_of(data: bytes) -> tuple[str, ...]:
    """Functions that the file defines under names that others can find, sorted. Raises ValueError as above."""
    found = {
        name
        for table in (_SHT_DYNSYM, _SHT_SYMTAB)
        for name, info, section in _symbols(data, table)
        if section and info & 15 == _STT_FUNC and info >> 4
    }
    return tuple(sorted(found))


def runs_by_itself(data: bytes) -> bool:
    """Whether a loader calls anything in the file when it is loaded or left: tables of functions, or one named for it (`_init`).

    Raises ValueError as above.
    """
    sections = _sections(data)
    if any(section.kind in _SHT_CALLED and section.size for section in sections):
        return True
    for section in sections:
        if section.kind == _SHT_DYNAMIC:
            entries = struct.iter_unpack("<qQ", data[section.offset : section.offset + section.size // 16 * 16])
            if any(tag in _DT_CALLED for tag, _ in entries):
                return True
    return False


class _Section(NamedTuple):
    """Elf64_Shdr: offset and size in bytes of the file; link: the section of a symbol table's names."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_bytes: int


def _sections(data: bytes) -> list[_Section]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("expected a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    return [_Section._make(struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry_size)) for i in range(count)]


def _symbols(data: bytes, table: int) -> Iterator[tuple[str, int, int]]:
    """(name, info, section) of every named symbol of the tables of one kind; section 0: undefined."""
    sections = _sections(data)
    for section in sections:
        if section.kind != table:
            continue
        strings = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, info, _other, shndx = struct.unpack_from("<IBBH", data, at)
            if name:
                end = data.index(b"\0", strings + name)
                yield data[strings + name : end].decode(errors="replace"), info, shndx
