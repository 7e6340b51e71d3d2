"""Copies as C++: tiles from global matrices and back. Which form a tile needs was decided in `layouts.py`."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Allocate, Copy, Op
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.ops import Refused
from generator.translate.cpu.unit import ELEMENT_TYPES, Form, Pack, Unit
from generator.translate.cpu.widths import CHUNK, cache_lines, chunks, padded
from generator.translate.passes.affine import sum_of


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


def origin(unit: Unit, s: Copy) -> tuple[str, str]:
    """The first row and column of the tile in the matrix, in elements."""
    parts = [sum_of(Op("*", (c, e))) if unit.types.is_integer(c) else c for c, e in zip(s.coordinate, s.shape, strict=False)]
    texts = [unit.names.text(e) for e in parts]
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
        message = f"{s.into}: a tile of whole numbers with two axes; read its elements as {s.source}[row, column] instead"
        raise Refused(message, s.span.line)
    if not tile.loaded:
        message = f"{s.into}: a tile that is copied from global memory and assigned as well; compute into another tile"
        raise Refused(message, s.span.line)
    out = [line for form in ("rows", "rows16", "turned16") for line in _operand(unit, s, form, first, last)]
    n, (rows, cols), source = s.into, tile.shape, _Source.of(unit, s, origin(unit, s))
    if n in unit.placement.turned:
        valid = f"imax(0, imin({rows}, {source.rows})), imax(0, imin({cols}, {source.cols}))"
        out.append(f"transpose({source.at}, {source.ld}, {valid}, q_{n}, {padded(rows)}, {padded(rows)}, {cols});")
    if n in unit.placement.pairs:
        out.append(
            f"pack_pairs({source.at}, {source.ld}, {source.rows}, imin({cols}, {source.cols}), hp_{n}, {rows}, {chunks(cols)});"
        )
    return out


@dataclass(frozen=True, slots=True)
class _Source:
    """A tile's place in its matrix, as C++ text: address, stride of rows, rows and columns from there to the end."""

    at: str
    ld: str
    rows: str
    cols: str

    @staticmethod
    def of(unit: Unit, s: Copy, start: tuple[str, str]) -> _Source:
        (row, col), n = start, s.source
        ld = f"s_{n}[{len(unit.matrix(n).offset)}]"
        at = f"m_{n} + ({row}) * {ld}" + ("" if col == "0" else f" + {col}")
        return _Source(at, ld, f"x_{n}[0] - {row}", f"x_{n}[1]" + ("" if col == "0" else f" - {col}"))


def pack_call(unit: Unit, s: Copy, form: Form, source: _Source, out: str, first: str, last: str) -> str:
    """The call that packs rows [first, last) of a tile, whatever its strides."""
    rows, cols = unit.tile(s.into).shape
    match form:
        case "rows":
            valid = f"{source.rows}, {cols}, {source.cols}, {_width(unit, s.into)}"
            return f"pack_rows({source.at}, {source.ld}, {first}, {last}, {valid}, (float*)({out}));"
        case "rows16":
            valid = f"{source.rows}, {cols}, {source.cols}"
            return f"pack_rows16({source.at}, {source.ld}, {first}, {last}, {valid}, (bf16*)({out}));"
        case "turned16":
            valid = f"{source.rows}, imin({cols}, {source.cols})"
            return f"pack_turned({source.at}, {source.ld}, {valid}, (bf16*)({out}), {chunks(rows)}, {chunks(cols)});"


def _width(unit: Unit, name: str) -> str:
    cols = unit.tile(name).shape[1]
    return padded(cols) if name in unit.placement.padded else str(cols)


def _operand(unit: Unit, s: Copy, form: Form, first: str, last: str) -> list[str]:
    """One form of a loaded tile: from what blocks share, where there is such; else seen in place or packed by this block."""
    n, (rows, cols), place = s.into, unit.tile(s.into).shape, unit.placement
    if n not in {"rows": place.plain, "rows16": place.rows16, "turned16": place.turned16}[form]:
        return []
    source = _Source.of(unit, s, origin(unit, s))
    where = f"{source.at}, {source.ld}, {first}, {last}, {source.rows}, {cols}, {source.cols}"
    packs = [offset for p, offset in offsets(unit) if (p.copy, p.form) == (s, form)]
    at = f"shared->tile(packed, {unit.names.text(s.coordinate[0])}){packs[0]}" if packs else ""
    match form:
        case "rows":
            own = f"w_{n} = view_rows({where}, {_width(unit, n)}, k_{n});"
            shared = f"w_{n} = {{(const float*)({at}), {_width(unit, n)}}};"
        case "rows16":
            own = f"h_{n} = view_rows16({where}, hk_{n});"
            shared = f"h_{n} = {{(const bf16*)({at}), {chunks(cols)}}};"
        case "turned16":
            own = pack_call(unit, s, form, source, f"hs_{n}", "0", str(rows)) + f" ht_{n} = hs_{n};"
            shared = f"ht_{n} = (const bf16*)({at});"
    return [f"if (shared) {shared}", f"else {{ {own} }}"] if packs else [own]


def offsets(unit: Unit) -> list[tuple[Pack, str]]:
    """Every shared pack with its place in the record of a tile, as C++ text to be added."""
    out, before = [], ""
    for p in unit.packs:
        out.append((p, before))
        before += f" + {cache_lines(p.size)}"
    return out


def pack_shared(unit: Unit) -> list[str]:
    """The body of the function that packs one tile of every shared copy: `packed` and `tile` are set, the block is entered."""
    out = []
    for p, offset in offsets(unit):
        rows = unit.tile(p.tile).rows
        source = _Source.of(unit, p.copy, (f"tile * {rows}", "0"))
        out.append(pack_call(unit, p.copy, p.form, source, f"shared->tile(packed, tile){offset}", "0", str(rows)))
    return out


def _load_line(unit: Unit, s: Copy, a: Allocate) -> list[str]:
    """A value a row, or a single one."""
    n = tile_name(s.into)
    if not a.shape:
        return [f"{n} = at_{s.source}();"]
    rows = unit.tile(s.into).shape[0]
    row, _ = origin(unit, s)
    return [f"for (int64_t r = 0; r < {padded(rows)}; ++r) {n}[r] = r < {rows} ? at_{s.source}({row} + r) : 0;"]


def declare_load(unit: Unit, name: str) -> list[str]:
    """Members of a loaded tile: where it is seen, and scratch for each form that it may have to be packed into."""
    rows, cols = unit.tile(name).shape
    place, out = unit.placement, []
    if name in place.plain:
        kind = ELEMENT_TYPES[unit.tile(name).dtype] if name in place.raw else "float"
        out += [f"View<{kind}> w_{name};", f"alignas(64) {kind} k_{name}[{rows} * {_width(unit, name)} + VL];"]
    if name in place.turned:
        out.append(f"alignas(64) float q_{name}[{cols} * {padded(rows)}];")
    if name in place.rows16:
        out += [f"View16 h_{name};", f"alignas(64) bf16 hk_{name}[{rows} * {chunks(cols)}];"]
    if name in place.turned16:
        out += [f"const bf16* ht_{name};", f"alignas(64) bf16 hs_{name}[{chunks(rows)} * {chunks(cols)}];"]
        out.append(f"alignas(64) bf16 hx_{name}[2 * {chunks(cols)} * {CHUNK}];")
    if name in place.pairs:
        out.append(f"alignas(64) bf16 hp_{name}[{rows} * {chunks(cols)}];")
    return out


def store(unit: Unit, s: Copy, scale: str | None) -> list[str]:
    """scale: rows by which a tile with two axes is multiplied on the way."""
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
    row, col = origin(unit, s)
    rows = f"imin({unit.rows(tile.shape[0])}, x_{s.into}[0] - {row})"
    k = len(a.offset)
    if len(tile.shape) == 1:
        return [f"store_line(m_{s.into} + ({row}) * s_{s.into}[{k}], s_{s.into}[{k}], {rows}, {tile_name(s.source)});"]
    if a.dtype == "i32" or tile.dtype == "i32":
        raise Refused(f"{s.source}: a tile of whole numbers with two axes cannot be stored", s.span.line)
    cols = tile.shape[1]
    fn, ld = ("store_lanes", padded(tile.shape[0])) if unit.is_lanes(s.source) else ("store_rows", padded(cols))
    place = f"m_{s.into} + ({row}) * s_{s.into}[{k}] + {col}, s_{s.into}[{k}]"
    by = tile_name(scale) if scale is not None else "nullptr"
    valid = f"{rows}, imin({cols}, x_{s.into}[1] - {col})"
    return [*unit.settle(s.source), f"{fn}({place}, {valid}, {unit.buffer(s.source)}, {ld}, {by});"]
