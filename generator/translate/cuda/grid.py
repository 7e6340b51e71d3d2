"""Blocks and iterations: which grid point a block is, and which tiles its loops run. The same text for all CUDA targets."""

from __future__ import annotations

from collections.abc import Iterator

from generator.tl.ir import ROWS, Expr, Num, Op, Var, walk
from generator.translate.cuda import names
from generator.translate.cuda.unit import Unit
from generator.translate.passes import LoopPlan, TileRange
from generator.translate.passes.affine import grows_with
from generator.translate.passes.ranges import ROW_FIRST, ROW_LAST


def write_decode(u: Unit, linear: str, first_reversed: bool) -> None:
    """Grid coordinates from a number that counts blocks, the first axis fastest."""
    u.w(f"const int block = {linear};")
    first, *others = u.program.axes
    name, extent = names.axis(first.name), u.scalar(first.extent)
    value = f"block % ({extent})" if others else "block"
    u.w(f"const int {name} = {f'({extent}) - 1 - {value}' if first_reversed else value};")
    if others:
        u.w(f"const int rest0 = block / ({extent});")
        _write_outer(u, "rest0")


def write_place(u: Unit, order: str, block: str) -> None:
    """Grid coordinates of a block in an order of sections (`tile_order`), which tells inner and outer index apart."""
    u.w(f"const Place place = {order}.at({block});")
    u.w(f"const int {names.axis(u.program.axes[0].name)} = place.inner;")
    _write_outer(u, "place.outer")


def _write_outer(u: Unit, rest: str) -> None:
    """All axes but the first, from the number that counts them."""
    axes = u.program.axes
    for k, axis in enumerate(axes[1:], 1):
        name, extent = names.axis(axis.name), u.scalar(axis.extent)
        last = k == len(axes) - 1
        u.w(f"const int {name} = {rest if last else f'{rest} % ({extent})'};")
        if not last:
            u.w(f"const int rest{k} = {rest} / ({extent});")
            rest = f"rest{k}"


def longest_first(u: Unit) -> bool:
    """Whether blocks further along the first axis run more iterations: then they should start first."""
    first = Var(u.program.axes[0].name)
    return any(grows_with(plan.range.hi, first) for plan in u.analysis.loops)


def live_rows(u: Unit) -> str:
    """Rows of this block that any output keeps."""
    live = u.analysis.live_rows
    return u.scalar(live) if live is not None else str(u.rows)


#: An extreme of values that are read row by row -> the C variable that holds it.
Scanned = dict[Expr, str]


def iteration(plan: LoopPlan, k: int, n: str) -> str:
    """C: the loop variable's value in the n-th iteration that is run, of the k-th loop, whose range is `range<k>`."""
    return f"range{k}.at(count{k} - 1 - ({n}))" if plan.loop.reversed else f"range{k}.at({n})"


def write_range(u: Unit, plan: LoopPlan, name: str, first: str, last: str, scanned: Scanned | None = None) -> None:
    """`Range NAME`: the iterations worth running for rows first..last of the block. scanned: extremes of these rows."""
    r = plan.range
    _bind_rows(u, first, last, scanned)
    _write_row_extremes(u, [r.lo, r.hi, *(r.gap or ())], u.rows)
    u.w(f"Range {name};", f"{name}.lo = {u.scalar(r.lo)};", f"{name}.hi = {u.scalar(r.hi)};")
    if r.gap is not None:
        u.w(f"{name}.close({u.scalar(r.gap[0])}, {u.scalar(r.gap[1])});")
    else:
        u.w(f"{name}.glo = {name}.lo;", f"{name}.gap = 0;")


def write_full(
    u: Unit, plan: LoopPlan, name: str, lo: str, hi: str, first: str, last: str, rows: int = 0, scanned: Scanned | None = None
) -> None:
    """`int lo, hi`: between them every test is true for rows first..last. Empty: both lie where the only edge loop takes all.

    rows: how many there are at most, if not the whole block's. scanned: extremes of these rows.
    """
    r = plan.range
    _bind_rows(u, first, last, scanned)
    _write_row_extremes(u, [r.full_lo, r.full_hi], rows or u.rows)
    u.w(f"int {lo} = {u.scalar(r.full_lo) if r.has_edge_below else name + '.lo'};")
    u.w(f"int {hi} = {u.scalar(r.full_hi) if r.has_edge_above else name + '.hi'};")


def reads_rows(bound: Expr) -> bool:
    """Whether a bound follows from the block's first and last row, and from no values that have to be read row by row."""
    parts = list(walk(bound))
    return any(e in (ROW_FIRST, ROW_LAST) for e in parts) and not any(True for _ in _extremes(bound))


def scans_rows(r: TileRange) -> bool:
    """Whether a loop's range follows from values that have to be read row by row."""
    return any(True for e in (r.lo, r.hi, *(r.gap or ())) for _ in _extremes(e))


def bound_of_rows(u: Unit, bound: Expr, first: str, last: str) -> str:
    """A bound of `TileRange` for some of the block's rows."""
    _bind_rows(u, first, last)
    return u.scalar(bound)


def has_edges(r: TileRange) -> bool:
    return r.has_edge_below or r.has_edge_above


def _bind_rows(u: Unit, first: str, last: str, scanned: Scanned | None = None) -> None:
    for e in [e for e in u.scalars.extra if isinstance(e, Op)]:
        del u.scalars.extra[e]
    u.scalars.extra[ROW_FIRST] = first
    u.scalars.extra[ROW_LAST] = last
    u.scalars.extra |= scanned or {}


def _write_row_extremes(u: Unit, bounds: list[Expr], rows: int) -> None:
    """Values that have to be read row by row, `rows` at most: the lanes of each warp share them; the last may be read twice."""
    wanted = dict.fromkeys(x for b in bounds for x in _extremes(b))
    found = _write_scan(u, [e for e in wanted if e not in u.scalars.extra], rows)
    write_joined(u, found)
    u.scalars.extra |= found


def write_scan(u: Unit, plan: LoopPlan, first: str, last: str) -> Scanned:
    """Every row-by-row extreme that a loop's bounds ask for, still apart in the lanes; `write_joined` puts them together.

    All values are read side by side, each once.
    """
    r = plan.range
    _bind_rows(u, first, last)
    bounds = (r.lo, r.hi, *(r.gap or ()), r.full_lo, r.full_hi)
    return _write_scan(u, list(dict.fromkeys(x for b in bounds for x in _extremes(b))), u.rows)


def _write_scan(u: Unit, extremes: list[Op], rows: int) -> Scanned:
    out: Scanned = {}
    for first, last in dict.fromkeys(e.args[1:] for e in extremes):
        of = [e for e in extremes if e.args[1:] == (first, last)]
        u.scalars.extra[ROWS] = "row_"
        values = {e.args[0]: u.scalar(e.args[0]) for e in of}
        del u.scalars.extra[ROWS]
        for e in of:
            out[e] = u.code.temporary()
            u.w(f"int {out[e]} = {'0x7fffffff' if e.fn == 'rows_min' else '-0x7fffffff - 1'};")
        u.w(f"UNROLL for (int n = 0; n < {-(-rows // 32)}; ++n) {{")  # all loads in flight together
        u.w(f"const int row_ = min({u.scalar(first)} + 32 * n + lane, {u.scalar(last)});")
        for value, text in values.items():
            x = u.code.temporary()
            u.w(f"const int {x} = {text};")
            u.w(*(f"{out[e]} = {e.fn[5:]}({out[e]}, {x});" for e in of if e.args[0] == value))
        u.w("}")
    return out


def write_joined(u: Unit, scanned: Scanned) -> None:
    """Extremes over the rows of every lane."""
    u.w(*(f"{x} = warp_{e.fn[5:]}({x});" for e, x in scanned.items() if isinstance(e, Op)))


def _extremes(e: Expr) -> Iterator[Op]:
    for x in walk(e):
        if isinstance(x, Op) and x.fn in ("rows_min", "rows_max"):
            yield x


def tile_coordinate(u: Unit, coordinate: tuple[Expr, ...], k: int, size: int) -> str:
    """The element at which a tile begins along one axis."""
    if k >= len(coordinate) or coordinate[k] == Num(0):
        return "0"
    return f"({u.scalar(coordinate[k])}) * {size}"
