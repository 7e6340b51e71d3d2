"""Register tiles to global memory: cast, stores as wide as the address allows, nothing past the end. Computes nothing."""

from __future__ import annotations

from generator.tl.ir import Allocate, Copy
from generator.translate.cuda import names
from generator.translate.cuda.dtypes import BYTES, C_TYPES, TYPES
from generator.translate.cuda.grid import tile_coordinate
from generator.translate.cuda.unit import Unit


def write_alignment(u: Unit, outputs: list[Allocate]) -> None:
    """Whether whole rows of an output can be written 16 bytes at a time; in narrow code, how many bytes at a time."""
    for a in outputs:
        if len(a.shape) == 2 and a.dtype in ("f16", "bf16"):
            if u.narrow:
                write_width(u, a)
            else:
                u.w(f"const bool aligned_{a.name} = (({row_bits(a)}) & 15) == 0;")


def write_width(u: Unit, a: Allocate) -> None:
    """How wide the rows of a matrix can be read or written, for this block's part of it."""
    u.w(f"const int {names.width(a.name)} = vector_width({row_bits(a)});")


def row_bits(a: Allocate) -> str:
    """C: an integer with every bit that the address of some row of the matrix has."""
    return f"(u64){names.lead(a.name)} | (u64)({BYTES[a.dtype]} * {names.stride(a.name, len(a.offset))})"


def write_store(u: Unit, s: Copy) -> None:
    """One `Copy X into Y from register to global`; a null address leaves the output out."""
    a, shape = u.program.allocations[s.into], u.shape(s.source)
    u.w(u.comment(s), f"if ({names.matrix(a.name)} != nullptr) {{")
    row = tile_coordinate(u, s.coordinate, 0, shape[0])
    left = f"min({names.extent(a.name, 0)} - ({row}), {shape[0]}) - row0"
    pitch = names.stride(a.name, len(a.offset))
    if len(shape) == 2:
        _store_matrix(u, s, a, row, left, pitch)
    else:
        _store_vector(u, s, a, row, left, pitch)
    u.w("}")


def _store_matrix(u: Unit, s: Copy, a: Allocate, row: str, left: str, pitch: str) -> None:
    n, size, values = u.shape(s.source)[1], BYTES[a.dtype], f"{names.tile(s.source)}[t]"
    u.w(
        f"const int left = {left}, cols = min({names.extent(a.name, 1)} - ({column_of(u, s, n)}), {n});",
        f"char* const out = {names.lead(a.name)} + {size} * ((i64)({row} + row0) * {pitch} + {column_of(u, s, n)});",
    )
    at, each_block = f"out + {size} * (i64)ROW(t, 0) * {pitch}, {size} * {pitch}", "UNROLL for (int t = 0; t < MT; ++t)"
    if a.dtype == "f32":
        u.w(f"{each_block} store_rows_f32<{n}>({at}, left - ROW(t, 0), cols, lane, {values});")
    elif a.dtype in ("f16", "bf16"):
        kind, store = TYPES[a.dtype], "store_rows_narrow" if u.narrow else "store_rows"
        how = names.width(a.name) if u.narrow else f"aligned_{a.name}"
        u.w(f"{each_block} {store}<{kind}, {n}>({at}, {how}, left - ROW(t, 0), cols, lane, {values});")
    else:
        place = f"((int*)out)[(i64)ROW(t, r) * {pitch} + lane_col + COL]"
        u.w(f"FOR_TILE({n}) if (ROW(t, r) < left && lane_col + COL < cols) {place} = {values}[AT];")


def column_of(u: Unit, s: Copy, n: int) -> str:
    return tile_coordinate(u, s.coordinate, 1, n)


def _store_vector(u: Unit, s: Copy, a: Allocate, row: str, left: str, pitch: str) -> None:
    value, at = f"{names.tile(s.source)}[t][r]", f"(char*)(out + (i64)ROW(t, r) * {pitch})"
    size = BYTES[a.dtype]
    if a.dtype in ("f16", "bf16"):
        value = f"narrow<{TYPES[a.dtype]}>({value})"
    elif a.dtype == "f32":
        value = f"__float_as_uint({value})"
    u.w(
        f"const int left = {left};",
        f"{C_TYPES[a.dtype]}* const out = ({C_TYPES[a.dtype]}*){names.lead(a.name)} + (i64)({row} + row0) * {pitch};",
        f"FOR_ROWS store_global{size}({at}, {value}, (lane & 3) == 0 && ROW(t, r) < left);",
    )
