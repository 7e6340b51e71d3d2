"""Names that a 64-bit little-endian ELF shared object imports. Reads the dynamic symbol table only; not a disassembler."""

from __future__ import annotations

import struct

_SHT_DYNSYM = 11


def imports_of(data: bytes) -> tuple[str, ...]:
    """Undefined dynamic symbols, sorted. Raises ValueError for anything but a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("expected a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry_size) for i in range(count)]
    names = set()
    for section in sections:
        if section[1] != _SHT_DYNSYM:
            continue
        start, size, link = section[4], section[5], section[6]
        strings = sections[link][4]
        for at in range(start, start + size, 24):
            name, _info, _other, shndx = struct.unpack_from("<IBBH", data, at)
            if shndx == 0 and name:
                end = data.index(b"\0", strings + name)
                names.add(data[strings + name : end].decode(errors="replace"))
    return tuple(sorted(names))
