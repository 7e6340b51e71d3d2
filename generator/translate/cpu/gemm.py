"""Products as calls of the runtime's register tiles: which operand is broadcast, which is read in vectors, with which strides."""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Gemm
from generator.translate.cpu.layouts import Layout, broadcast_operand, is_dot, vector_operand
from generator.translate.cpu.limits import seen_by_row
from generator.translate.cpu.names import tile_name
from generator.translate.cpu.ops import Product
from generator.translate.cpu.unit import Unit, indent
from generator.translate.cpu.widths import CHUNK, VECTOR, chunks, padded


@dataclass(frozen=True, slots=True)
class Place:
    """A tile in memory: address of element (0, 0), and the strides of its rows and columns."""

    at: str
    by_row: str
    by_column: str

    def moved(self, by: str, stride: str) -> str:
        return self.at if by == "0" else f"{self.at} + {by}" + ("" if stride == "1" else f" * {stride}")


def place_of(unit: Unit, name: str, turned: bool = False) -> Place:
    """turned: of a loaded tile, its transpose."""
    tile = unit.tile(name)
    if tile.loaded:
        return Place(f"q_{name}", "1", padded(tile.shape[0])) if turned else Place(f"w_{name}.p", f"w_{name}.ld", "1")
    if unit.is_lanes(name):
        return Place(unit.buffer(name), "1", padded(tile.shape[0]))
    return Place(unit.buffer(name), padded(tile.shape[1]), "1")


def contraction(unit: Unit, g: Gemm, loop: int | None) -> tuple[str, str]:
    """The part of the contracted length that holds anything."""
    size = unit.tile(g.a).shape[0 if g.a_transposed else 1]
    return ("0", str(size)) if g.a_transposed else unit.span(unit.span_of(g.a, loop), size)


@dataclass(frozen=True, slots=True)
class BlockPass:
    """A nest over the columns of a product's result that runs on each block of it as it is made: a function and its maxima.

    everywhere: calls that run it on the whole tile, in edge tiles, where products leave blocks out.
    """

    function: str
    has_edge: bool
    maxima: tuple[str, ...]
    everywhere: tuple[str, ...]


def takes_pass(unit: Unit, op: Product) -> bool:
    """Whether a product can run a pass on its blocks: one of bf16 tiles whose result starts here, no columns to fill it up."""
    g = op.gemm
    return id(op) in unit.placement.bf16 and not g.accumulate and g.b_transposed


def product(unit: Unit, op: Product, loop: int | None, behind: BlockPass | None = None) -> list[str]:
    """c[i][lane] (+)= sum over t of a[i][t] * b[t][lane]; i is a column of a LANES result, a row of a ROWS one."""
    g = op.gemm
    settled = [line for n in dict.fromkeys((g.a, g.b)) for line in unit.settle(n)]
    ends = [f"zero_{g.into} = false;"] if g.into in unit.zeros else []
    if id(op) in unit.placement.bf16:
        return [*settled, *_bf16(unit, op, loop, behind), *ends]
    if is_dot(g, unit.ops, unit.placement):
        return [*settled, *_dot(unit, op, loop), *ends]
    return [*settled, *_fp32(unit, op, loop), *ends]


def _fp32(unit: Unit, op: Product, loop: int | None) -> list[str]:
    g, layout = op.gemm, unit.placement.layout[op.gemm.into]
    lanes_first = layout is Layout.LANES
    before, vector = _vector(unit, g, layout)
    place = place_of(unit, broadcast_operand(g, layout))
    along_rows = g.b_transposed if lanes_first else not g.a_transposed  # whether the broadcast index is the operand's row
    si, st = (place.by_row, place.by_column) if along_rows else (place.by_column, place.by_row)
    t0, t1 = contraction(unit, g, loop)
    ldb = vector.by_column if vector_operand(g, layout)[1] else vector.by_row
    scale, by = (tile_name(op.scale), "BY_LANE" if lanes_first else "BY_ROW") if op.scale is not None else ("nullptr", "NONE")
    lanes = padded(unit.tile(g.into).shape[0 if lanes_first else 1])
    template = f"<{lanes}, {'true' if g.accumulate else 'false'}, {by}>"
    into, ld = unit.buffer(g.into), lanes
    if lanes_first:
        n0, n1 = unit.columns(g.into, loop)
        a, b = place.moved(t0, st), vector.moved(t0, ldb)
        call = f"Span{{{n0}, {n1}}}, {a}, {si}, {st}, {b}, {ldb}, {_minus(t1, t0)}, {into}, {ld}, {scale}"
        bounded = g.into
    else:
        rows = unit.rows(unit.tile(g.into).rows)
        call = f"{rows}, {place.at}, {si}, {st}, {vector.at}, {ldb}, Span{{{t0}, {t1}}}, {into}, {ld}, {scale}"
        bounded = g.a if not g.a_transposed else ""
    tail = f", EDGE ? &seen{loop} : nullptr" if has_edges(unit, bounded, loop) else ""
    if g.accumulate and g.into in unit.zeros:
        if op.scale is not None:
            rows = unit.rows(unit.tile(g.into).rows)
            before += [f"if (zero_{g.into} && !all_finite({scale}, {rows})) {{", *indent(unit.settle(g.into)), "}"]
        tail = f"{tail or ', nullptr'}, zero_{g.into}"
    return [*before, f"product_{'lanes' if lanes_first else 'rows'}{template}({call}{tail});"]


def _bf16(unit: Unit, op: Product, loop: int | None, behind: BlockPass | None) -> list[str]:
    """Rows of B (or its columns, turned) by pairs of A: result column by column, its rows in lanes."""
    g = op.gemm
    (rows, cols), inner = unit.tile(g.into).shape, unit.tile(g.a).shape[1]
    t0, t1 = contraction(unit, g, loop)
    if g.b_transposed:
        n0, n1 = unit.columns(g.into, loop)
        first, ld, step = f"h_{g.b}.p", f"h_{g.b}.ld", str(CHUNK)
    else:
        n0, n1 = "0", str(chunks(cols))
        first, ld, step = f"ht_{g.b}", str(CHUNK), str(chunks(cols) * CHUNK)
    pairs = f"hp_{g.a}" if unit.tile(g.a).loaded else tile_name(g.a)
    inside = f"Span{{{t0}, {chunks(inner) if t1 == str(inner) else t1}}}"
    call = f"Span{{{n0}, {n1}}}, {first}, {ld}, {step}, {inside}, {pairs}, {chunks(inner) * VECTOR}, {unit.buffer(g.into)}"
    start = f", zero_{g.into}" if g.accumulate and g.into in unit.zeros else ""
    edges = ", ".join(f"EDGE ? &seen{loop} : nullptr" if has_edges(unit, n, loop) else "nullptr" for n in (g.into, g.a))
    product_of = f"product_bf16<{rows}, {'true' if g.accumulate else 'false'}>"
    if behind is not None:
        return _with_pass(unit, f"{product_of}({call}, Edges{{{edges}}}", rows, loop, behind)
    if unit.span_of(g.a, loop) is None:
        return [f"{product_of}({call}, Edges{{{edges}}}{start});"]
    name = f"edges_{g.b}_{g.into}"
    hidden = f"if (EDGE) hide_ends({name}, {first}, {chunks(cols)}, exact{loop}, hx_{g.b});"
    return [f"Edges {name}{{{edges}}};", hidden, f"{product_of}({call}, {name}{start});"]


def _with_pass(unit: Unit, call: str, rows: int, loop: int | None, behind: BlockPass) -> list[str]:
    """call: of the product, without what follows its edges. Its blocks are a chunk of lanes wide."""
    start = [f"no_maxima<{rows}>({tile_name(r)});" for r in behind.maxima]
    each = f"{behind.function}<{CHUNK} / VL{', EDGE' if behind.has_edge else ''}>(lane, n0, n1);"
    blocks = f"{call}, false, [&](int64_t lane, int64_t n0, int64_t n1) {{ {each} }});"
    if loop is None or not unit.limits[loop].masked:
        return [*start, blocks]
    return [*start, "if constexpr (!EDGE) {", f"  {blocks}", "} else {", *indent([f"{call});", *behind.everywhere]), "}"]


def has_edges(unit: Unit, name: str, loop: int | None) -> bool:
    """Whether each row of a tile sees one interval of its columns in this loop, so that edge tiles can leave out the rest."""
    return loop is not None and unit.span_of(name, loop) is not None and seen_by_row(unit.limits[loop]) is not None


def _dot(unit: Unit, op: Product, loop: int | None) -> list[str]:
    g = op.gemm
    a, b = place_of(unit, g.a), place_of(unit, g.b)
    rows, cols = unit.tile(g.into).shape
    first, last = unit.columns(g.into, loop)
    scale, by = (tile_name(op.scale), "BY_ROW") if op.scale is not None else ("nullptr", "NONE")
    operands = f"{a.at}, {a.by_row}, {b.at}, {b.by_row}, {first}, {last}, {padded(unit.tile(g.a).shape[1])}"
    adds = "true" if g.accumulate else "false"
    return [f"dot_product<{rows}, {adds}, {by}>({operands}, {unit.buffer(g.into)}, {padded(cols)}, {scale});"]


def _minus(a: str, b: str) -> str:
    return a if b == "0" else f"{a} - {b}"


def _vector(unit: Unit, g: Gemm, layout: Layout) -> tuple[list[str], Place]:
    """The operand that is read in vectors; a register tile that lies the other way is transposed into scratch first."""
    name, down = vector_operand(g, layout)
    tile = unit.tile(name)
    if tile.loaded:
        return [], place_of(unit, name, turned=down)
    if unit.is_lanes(name) == down:
        return [], place_of(unit, name)
    scratch = f"y{len(unit.members)}_{tile_name(name)}"
    rows, cols = tile.shape
    lines, out_lines = (rows, cols) if not unit.is_lanes(name) else (cols, rows)
    unit.members.append(f"alignas(64) float {scratch}[{out_lines} * {padded(lines)}];")
    ld = padded(out_lines)
    text = (
        f"transpose({unit.buffer(name)}, {ld}, {lines}, {out_lines}, {scratch}, {padded(lines)}, {padded(lines)}, {out_lines});"
    )
    place = Place(scratch, "1", padded(rows)) if down else Place(scratch, padded(cols), "1")
    return [text], place
