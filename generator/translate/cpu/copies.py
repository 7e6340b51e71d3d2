"""Copies as C++: tiles from global matrices and back. Which form a tile needs was decided in `layouts.py`."""

from __future__ import annotations

from generator.tl.ir import Allocate, Copy, Num
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.ops import Refused
from generator.translate.cpu.unit import ELEMENT_TYPES, Unit, padded


def declare_matrix(unit: Unit, a: Allocate) -> list[str]:
    """Members of a global matrix: base address and strides of the call; what one block addresses (m_) and its extents."""
    t, n = ELEMENT_TYPES[a.dtype], a.name
    ndim = len(a.offset) + len(a.shape)
    out = [
        f"{t}* p_{n}; int64_t s_{n}[{max(ndim, 1)}];  // {n}: address and strides",
        f"{t}* m_{n}; int64_t x_{n}[{max(len(a.shape), 1)}];",
    ]
    args = ", ".join(f"int64_t i{k}" for k in range(len(a.shape)))
    inside = " && ".join(f"(uint64_t)i{k} < (uint64_t)x_{n}[{k}]" for k in range(len(a.shape))) or "true"
    at = " + ".join(f"i{k} * s_{n}[{len(a.offset) + k}]" for k in range(len(a.shape))) or "0"
    value, zero = ("m_{0}[{1}]", "0") if a.dtype == "i32" else ("to_float(m_{0}[{1}])", "0.f")
    kind = "int64_t" if a.dtype == "i32" else "float"
    out.append(f"MEMBER {kind} at_{n}({args}) const {{ return {inside} ? {value.format(n, at)} : {zero}; }}  // outside: zero")
    return out


def enter_matrix(unit: Unit, a: Allocate) -> list[str]:
    """At the start of a block: where its part of the matrix starts, and how far it goes."""
    offset = "".join(f" + {unit.names.text(e)} * s_{a.name}[{k}]" for k, e in enumerate(a.offset))
    extents = [f"x_{a.name}[{k}] = {unit.names.text(e)};" for k, e in enumerate(a.shape)]
    return [f"m_{a.name} = p_{a.name}{offset};", *extents]


def origin(unit: Unit, s: Copy, matrix: str) -> tuple[str, str]:
    """The first row and column of the tile in the matrix, in elements."""
    texts = [f"{unit.names.text(c)} * {unit.names.text(e)}" for c, e in zip(s.coordinate, s.shape, strict=False)]
    texts += ["0"] * (2 - len(texts))
    return texts[0], texts[1]


def load(unit: Unit, s: Copy, first: str, last: str) -> list[str]:
    """first, last: the rows that anything reads."""
    a, tile = unit.matrix(s.source), unit.tile(s.into)
    if len(a.shape) != len(tile.shape):
        raise Refused(f"{s.into}: a tile with {len(tile.shape)} axes of a matrix with {len(a.shape)}", s.span.line)
    if len(tile.shape) < 2:
        return _load_line(unit, s, a)
    if a.dtype == "i32":
        raise Refused(
            f"{s.into}: a tile of whole numbers with two axes; read its elements as {s.source}[row, column] instead", s.span.line
        )
    (rows, cols), (row, col) = tile.shape, origin(unit, s, s.source)
    n, k = s.into, len(a.offset)
    source = f"m_{s.source} + ({row}) * s_{s.source}[{k}] + {col}"
    valid = f"x_{s.source}[0] - {row}, {{}}x_{s.source}[1] - {col}"
    out = []
    if not tile.loaded:
        raise Refused(
            f"{n}: a tile that is copied from global memory and assigned as well; compute into another tile", s.span.line
        )
    if n in unit.placement.plain:
        width = padded(cols) if n in unit.placement.padded else str(cols)
        out.append(
            f"w_{n} = view_rows({source}, s_{s.source}[{k}], {first}, {last}, {valid.format(f'{cols}, ')}, {width}, k_{n});"
        )
    if n in unit.placement.turned:
        limits = f"imax(0, imin({rows}, x_{s.source}[0] - {row})), imax(0, imin({cols}, x_{s.source}[1] - {col}))"
        out.append(f"transpose({source}, s_{s.source}[{k}], {limits}, q_{n}, {padded(rows)}, {padded(rows)}, {cols});")
    return out


def _load_line(unit: Unit, s: Copy, a: Allocate) -> list[str]:
    """A value a row, or a single one."""
    n = tile_name(s.into)
    if not a.shape:
        return [f"{n} = at_{s.source}();"]
    rows = unit.tile(s.into).shape[0]
    row, _ = origin(unit, s, s.source)
    return [f"for (int64_t r = 0; r < {padded(rows)}; ++r) {n}[r] = r < {rows} ? at_{s.source}({row} + r) : 0;"]


def declare_load(unit: Unit, name: str) -> list[str]:
    """Members of a loaded tile: where it is seen, scratch for packing it, its transpose."""
    tile = unit.tile(name)
    if not tile.is_element:
        return []
    rows, cols = tile.shape
    out = []
    if name in unit.placement.plain:
        width = padded(cols) if name in unit.placement.padded else str(cols)
        out += [f"View w_{name};", f"alignas(64) float k_{name}[{rows} * {width} + VL];"]
    if name in unit.placement.turned:
        out.append(f"alignas(64) float q_{name}[{cols} * {padded(rows)}];")
    return out


def store(unit: Unit, s: Copy) -> list[str]:
    a, tile = unit.matrix(s.into), unit.tile(s.source)
    if len(a.shape) != len(tile.shape):
        raise Refused(f"{s.into}: a tile with {len(tile.shape)} axes for a matrix with {len(a.shape)}", s.span.line)
    if tile.is_element and tile.loaded:
        raise Refused(
            f"{s.source}: a copy from global memory to global memory; compute into a register tile between", s.span.line
        )
    if not tile.shape:
        return [
            f"{'*m_' + s.into} = (int32_t){tile_name(s.source)};"
            if a.dtype == "i32"
            else f"from_float(m_{s.into}, {tile_name(s.source)});"
        ]
    row, col = origin(unit, s, s.into)
    rows = f"imin({unit.rows(tile.shape[0])}, x_{s.into}[0] - {row})"
    k = len(a.offset)
    if len(tile.shape) == 1:
        return [f"store_line(m_{s.into} + ({row}) * s_{s.into}[{k}], s_{s.into}[{k}], {rows}, {tile_name(s.source)});"]
    if a.dtype == "i32" or tile.dtype == "i32":
        raise Refused(f"{s.source}: a tile of whole numbers with two axes cannot be stored", s.span.line)
    cols = tile.shape[1]
    fn, ld = ("store_lanes", padded(tile.shape[0])) if unit.is_lanes(s.source) else ("store_rows", padded(cols))
    place = f"m_{s.into} + ({row}) * s_{s.into}[{k}] + {col}, s_{s.into}[{k}]"
    return [f"{fn}({place}, {rows}, imin({cols}, x_{s.into}[1] - {col}), {unit.buffer(s.source)}, {ld});"]


def is_whole(e: object) -> bool:
    return isinstance(e, Num)
