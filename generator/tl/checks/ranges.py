"""Where tiles lie: coordinates outside their matrix, and loops over a ragged extent that never test it. Reads core code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from generator.tl.checks.bounds import Bounds
from generator.tl.checks.report import Report
from generator.tl.fold import integers
from generator.tl.ir import (
    Allocate,
    Compute,
    Copy,
    Expr,
    For,
    Gemm,
    If,
    Op,
    Program,
    Stmt,
    Var,
    names,
    walk,
    walk_statements,
)
from generator.tl.printer import print_expression
from generator.tl.types import COMPARISONS


def check_ranges(program: Program, report: Report, bounds: Bounds) -> None:
    matrices = {name: a for name, a in program.allocations.items() if a.level == "global"}
    _body(program.body, matrices, report, bounds)


def _body(body: Iterable[Stmt], matrices: dict[str, Allocate], report: Report, bounds: Bounds) -> None:
    for s in body:
        match s:
            case Copy():
                _coordinates(s, matrices, report, bounds)
            case For():
                _ragged(s, matrices, report)
                _body(s.body, matrices, report, bounds.within(s))
            case If():
                _body((*s.then, *s.otherwise), matrices, report, bounds)
            case _:
                pass


def _coordinates(s: Copy, matrices: dict[str, Allocate], report: Report, bounds: Bounds) -> None:
    matrix = matrices.get(s.source if s.source_level == "global" else s.into)
    if matrix is None or "global" not in (s.source_level, s.into_level):
        return
    for axis, tile, coordinate, extent in zip("LD", s.shape, s.coordinate, matrix.shape, strict=False):
        lo, hi = bounds.of_expression(coordinate)
        text = f"{axis} = {print_expression(coordinate)}"
        if lo > hi:
            continue  # nothing runs here
        if hi < 0 or (lo < 0 and not math.isinf(lo)):
            hint = "coordinates count tiles from 0; an expression that can be negative wants max(..., 0)"
            found = int(hi if hi < 0 else lo)
            message = f"the coordinate {text} {'is' if hi < 0 else 'reaches'} {found}"
            report.error("coordinate", message, s.span, hint, "at least 0", str(found))
        sizes = integers((tile, extent))
        if sizes is not None and sizes[0] > 0 and not math.isinf(lo):
            _beyond(s, text, (lo, hi), sizes[0], sizes[1], matrix, report)


def _beyond(s: Copy, text: str, reach: tuple[float, float], tile: int, extent: int, matrix: Allocate, report: Report) -> None:
    most = reach[0] if math.isinf(reach[1]) else reach[1]
    if most * tile >= extent:
        tiles = -(-extent // tile)
        message = (
            f"tile {int(most)} of {text} lies past the end of {matrix.name}: {extent} elements are {tiles} tile(s) of {tile}"
        )
        hint = "coordinates count tiles, not elements"
        report.error("coordinate", message, s.span, hint, f"below {tiles}", str(int(most)))


def _ragged(loop: For, matrices: dict[str, Allocate], report: Report) -> None:
    """Warn where the columns of scores can lie past the last key and no test of the loop says so.

    Past the end a tile is zero: harmless along a contracted axis, a wrong score along the others.
    """
    for copy, axis in _copies_by(loop, matrices):
        extent, tile = matrices[copy.source].shape[axis], copy.shape[axis]
        if _holds_whole_tiles(extent, tile):
            continue
        if loop.hi == Op("//", (extent, tile)) or not _reaches_scores(loop, copy.into, axis) or _is_tested(loop, extent):
            continue
        shown = print_expression(extent)
        message = f"the last tile of {copy.source} may reach past {shown}, and no test in this loop mentions {shown}"
        report.warning("ragged", message, loop.span, f"hide what lies beyond: where(position < {shown}, ..., -inf)")


def _holds_whole_tiles(extent: Expr, tile: Expr) -> bool:
    """Whether the extent is a multiple of the tile: as a number, or by a factor, as a pool of pages is."""
    sizes = integers((extent, tile))
    if sizes is not None:
        return sizes[1] < 1 or sizes[0] % sizes[1] == 0
    return isinstance(extent, Op) and extent.fn == "*" and any(_holds_whole_tiles(factor, tile) for factor in extent.args)


def _copies_by(loop: For, matrices: dict[str, Allocate]) -> Iterator[tuple[Copy, int]]:
    """Copies out of a matrix that follow the loop, with the axis along which they do."""
    for s in walk_statements(loop.body):
        if isinstance(s, Copy) and s.source_level == "global" and s.source in matrices:
            for axis, coordinate in enumerate(s.coordinate[: len(matrices[s.source].shape)]):
                if loop.var in names(coordinate):
                    yield s, axis


def _reaches_scores(loop: For, tile: str, axis: int) -> bool:
    """Whether this axis of the tile becomes an axis of a product that a Compute of the loop reads."""
    products = set()
    for s in walk_statements(loop.body):
        if isinstance(s, Gemm):
            contracted_in_a, contracted_in_b = int(not s.a_transposed), int(s.b_transposed)
            if (s.a == tile and contracted_in_a != axis) or (s.b == tile and contracted_in_b != axis):
                products.add(s.into)
    return any(isinstance(s, Compute) and products & names(s.value) for s in walk_statements(loop.body))


def _is_tested(loop: For, extent: Expr) -> bool:
    return any(_mentions(e, extent) for test in _tests(loop.body) for e in walk(test))


def _mentions(e: Expr, extent: Expr) -> bool:
    return e == extent or (isinstance(e, Var) and e.name in names(extent))


def _tests(body: tuple[Stmt, ...]) -> Iterator[Expr]:
    for s in walk_statements(body):
        if isinstance(s, Compute):
            yield from (e for e in walk(s.value) if isinstance(e, Op) and e.fn in COMPARISONS)
        elif isinstance(s, If):
            yield s.test
