"""Every statement of code by itself: names, levels, ranks, kinds. Flow, shapes and ranges are read off core code elsewhere."""

from __future__ import annotations

from typing import TypeGuard, assert_never

from generator.tl.checks.declarations import INT_SCALAR, check_declaration
from generator.tl.checks.expressions import check_expression, check_scalar, check_value
from generator.tl.checks.names import Scope
from generator.tl.checks.report import shape_text
from generator.tl.expressions import did_you_mean
from generator.tl.grammar import FORMS, FRAGMENT_A, FRAGMENT_C, MACROS
from generator.tl.ir import (
    Allocate,
    Argument,
    Compute,
    Constant,
    Copy,
    Expr,
    For,
    Gemm,
    Grid,
    Hint,
    If,
    Let,
    Named,
    Option,
    Prose,
    Reshape,
    Span,
    Stmt,
    Var,
    walk,
)
from generator.tl.types import Kind, Tile


def check_statements(body: tuple[Stmt, ...], scope: Scope, top: bool = True) -> None:
    """A body in textual order; `top` where declarations may stand."""
    for s in body:
        if not top and isinstance(s, Argument | Constant | Grid | Allocate | Hint | Option):
            hint = "declare it before the first loop"
            scope.report.error("misplaced", f"{type(s).__name__} cannot stand inside a block", s.span, hint)
        _check(s, scope)


def _check(s: Stmt, scope: Scope) -> None:
    match s:
        case Argument() | Constant() | Grid() | Let() | Allocate() | Hint() | Option():
            check_declaration(s, scope)
        case Copy():
            _copy(s, scope)
        case Gemm():
            _gemm(s, scope)
        case Compute():
            _compute(s, scope)
        case Named():
            _named(s, scope)
        case Reshape():
            _reshape(s, scope)
        case For():
            _for(s, scope)
        case If():
            check_scalar(s.test, scope, Kind.BOOL, "the test of an if")
            check_statements(s.then, scope.inner(), top=False)
            check_statements(s.otherwise, scope.inner(), top=False)
        case Prose():
            scope.report.error("prose", "a line of code has to be a statement", s.span, "prose belongs to sketches")
        case _:
            assert_never(s)


def _copy(s: Copy, scope: Scope) -> None:
    for e in s.shape:
        check_scalar(e, scope, Kind.INT, "an extent of a tile")
    for e in s.coordinate:
        check_scalar(e, scope, Kind.INT, "a tile coordinate")
    if s.source_level == s.into_level:
        levels = f"from {s.source_level} to {s.into_level}"
        scope.report.error("level", f"a copy {levels} moves nothing", s.span, "copy between two levels of memory")
        scope.silent.add(s.into)
        return
    source = _source(s, scope)
    if s.into_level == "global":
        if s.into not in scope.matrices:
            _no_matrix(s.into, s.span, scope)
        return
    if source is not None:
        _into_tile(s, source, scope)


def _source(s: Copy, scope: Scope) -> Allocate | Tile | None:
    """What is copied, if it is where the statement says; reported if not."""
    if s.source_level == "global":
        if s.source not in scope.matrices:
            _no_matrix(s.source, s.span, scope)
            return None
        if not s.shape and scope.matrices[s.source].shape:
            hint = f"write {FORMS['Copy']}"
            scope.report.error("missing-shape", f"the copy of {s.source} does not say which tile", s.span, hint)
        return scope.matrices[s.source]
    tile = tile_of(s.source, s.span, scope)
    if tile is not None and tile.level != s.source_level:
        message = f"{s.source} lies in {tile.level}, not in {s.source_level}"
        scope.report.error("level", message, s.span, f"write from {tile.level}", tile.level, s.source_level)
        return None
    return tile


def _no_matrix(name: str, span: Span, scope: Scope) -> None:
    if name in scope.tiles:
        hint = f"Allocate a matrix in global and write Copy {name} into MATRIX ..."
        scope.report.error("level", f"{name} is a tile, not a matrix in global memory", span, hint, "a matrix", "a tile")
    else:
        scope.unknown(name, span, "matrix")


def _into_tile(s: Copy, source: Allocate | Tile, scope: Scope) -> None:
    existing = scope.tiles.get(s.into)
    if existing is not None and existing.level != s.into_level:
        message = f"{s.into} lies in {existing.level}, not in {s.into_level}"
        scope.report.error("level", message, s.span, f"write to {existing.level}", existing.level, s.into_level)
    shape = s.shape or source.shape
    if len(shape) in (1, 2):
        tile = Tile(s.into, s.into_level, shape, source.dtype)
        scope.make_tile(tile, s.span, of_matrix=s.source_level == "global" and s.source == s.into)
    else:
        scope.report.error("shape", f"a tile has one or two axes, found {len(shape)}", s.span, "read single numbers by NAME[]")


def tile_of(name: str, span: Span, scope: Scope, what: str = "tile") -> Tile | None:
    """The tile of this name, reported if there is none."""
    if name in scope.tiles:
        return scope.tiles[name]
    if name in scope.matrices:
        if not scope.first_report(name):
            return None
        hint = f"copy it first: Copy {name} (ROWS, COLUMNS) in coordinate [L = ..., D = ...] from global to shared"
        message = f"{name} is a matrix in global memory, not a tile"
        scope.report.error("level", message, span, hint, "a tile in shared or register", "global")
    elif name in scope.typings:
        hint = "a number keeps its value: name another one with Let, or keep what changes in a tile"
        scope.report.error("kind", f"{name} is one number, not a tile", span, hint, "a tile", "a number")
    else:
        scope.unknown(name, span, what)
    return None


def _gemm(s: Gemm, scope: Scope) -> None:
    operands = [tile_of(name, s.span, scope) for name in (s.a, s.b)]
    for tile in operands:
        if tile is not None and len(tile.shape) != 2:
            hint = "multiply a row by Compute NAME = TILE * ROW"
            scope.report.error("shape", f"{tile.name} has one axis: a GEMM takes tiles with two", s.span, hint)
    axes = [
        tile.shape[axis] for tile, axis in zip(operands, (s.a_transposed, not s.b_transposed), strict=True) if _is_matrix(tile)
    ]
    into = _result(s.into, s.span, scope, shape_text(axes) if len(axes) == 2 else "(ROWS, COLUMNS)")
    if into is not None and into.dtype != "f32":
        hint = f"allocate {s.into} as f32; round it by Reshape or by the copy into global"
        scope.report.error("dtype", f"a GEMM accumulates in f32, {s.into} is {into.dtype}", s.span, hint, "f32", into.dtype)


def _is_matrix(tile: Tile | None) -> TypeGuard[Tile]:
    return tile is not None and len(tile.shape) == 2


def _result(name: str, span: Span, scope: Scope, shape: str) -> Tile | None:
    """The register tile that a Compute writes, reported if it is none."""
    if name not in scope.tiles and name not in scope.matrices and name not in scope.typings:
        if name in scope.later and scope.later[name].line > span.line:
            scope.unknown(name, span, "tile")
        elif scope.first_report(name):
            close = did_you_mean(name, scope.tiles)
            hint = f"add before the loops: Allocate {name} in register {shape} f32" + (f"; or {close}" if close else "")
            scope.report.error("unallocated", f"{name} is not allocated", span, hint, found=name)
        return None
    if name in scope.matrices and name not in scope.tiles:
        hint = f"compute into a tile, then Copy TILE into {name} ... from register to global"
        message = f"{name} is a matrix in global memory: nothing is computed there"
        scope.report.error("level", message, span, hint, "register", "global")
        return None
    tile = tile_of(name, span, scope)
    if tile is not None and tile.level != "register":
        hint = f"compute into a register tile, then Copy it into {name} from register to shared"
        scope.report.error("level", f"{name} lies in {tile.level}: results are in registers", span, hint, "register", tile.level)
        return None
    return tile


def _compute(s: Compute, scope: Scope) -> None:
    tile = _result(s.into, s.span, scope, _likely_shape(s.value, scope))
    if tile is None:
        check_expression(s.value, scope)
    else:
        check_value(s.value, scope, tile.typing.rank, tile.typing.kind, s.into)


def _likely_shape(e: Expr, scope: Scope) -> str:
    """For the hint about a missing Allocate: the shape of a tile that the expression reads."""
    shapes = [scope.tiles[x.name].shape for x in walk(e) if isinstance(x, Var) and x.name in scope.tiles]
    with_columns = [shape for shape in shapes if len(shape) == 2] or shapes
    return shape_text(with_columns[0]) if shapes else "(ROWS, COLUMNS)"


def _named(s: Named, scope: Scope) -> None:
    if s.operator not in MACROS.values():
        hint = did_you_mean(s.operator, MACROS.values()) or "write it out: Compute NAME = EXPRESSION"
        scope.report.error("macro", f"{s.operator} has no stated meaning in code", s.span, hint, "Softmax", s.operator)
        return
    scores = s.operands[0]
    tile_of(scores, s.span, scope)
    into = s.into if s.into is not None else scores
    _result(into, s.span, scope, "(ROWS, COLUMNS)")
    if len(s.operands) > 2:
        hint = "write Compute Softmax S, scale and get P with ..."
        scope.report.error("arity", "Softmax takes its scores and a scale", s.span, hint, "2", str(len(s.operands)))
    if len(s.operands) > 1:
        check_scalar(Var(s.operands[1], span=s.span), scope, Kind.FLOAT, "the scale of Softmax")
        if s.operands[1] in scope.unpromised:
            hint = f"write Argument {s.operands[1]} f32 positive, or multiply the scores by it and leave it out here"
            scope.report.warning("promise", f"Softmax needs a positive {s.operands[1]}", s.span, hint)
    if len(s.state) < 2:
        hint = (
            f"write Compute Softmax {', '.join(s.operands)} and get {into} with row_max, row_sum, acc, all allocated in register"
        )
        scope.report.error("macro", "Softmax needs the tiles that keep its row maximum and row sum", s.span, hint)
    for i, name in enumerate(s.state):
        tile = _result(name, s.span, scope, "(ROWS)" if i < 2 else "(ROWS, COLUMNS)")
        axes = 1 if i < 2 else 2
        if tile is not None and len(tile.shape) != axes:
            what = ("the row maximum", "the row sum")[i] if i < 2 else "an accumulator"
            message = f"{name} is {what} of Softmax: it has {axes} ax{'i' if axes == 1 else 'e'}s"
            scope.report.error("rank", message, s.span, "", str(axes), str(len(tile.shape)))


def _reshape(s: Reshape, scope: Scope) -> None:
    tile = tile_of(s.source, s.span, scope)
    if s.source_layout != FRAGMENT_C or s.into_layout != FRAGMENT_A:
        expected = f"from ({', '.join(FRAGMENT_C)}) to ({', '.join(FRAGMENT_A)})"
        found = f"from ({', '.join(s.source_layout)}) to ({', '.join(s.into_layout)})"
        hint = f"write Reshape {s.source} {expected} and get {s.into} {s.dtype}"
        scope.report.error("reshape", "a Reshape turns an accumulator into an A operand", s.span, hint, expected, found)
    if s.dtype == "i32":
        scope.report.error("dtype", "an operand of a GEMM is f32, f16 or bf16", s.span, "", "f32, f16 or bf16", s.dtype)
    if tile is None:
        return
    if tile.level != "register" or len(tile.shape) != 2:
        where = f"{s.source} lies in {tile.level}" if tile.level != "register" else f"{s.source} has one axis"
        hint = "a tile in shared memory is an operand as it is" if tile.level == "shared" else ""
        scope.report.error("reshape", f"a Reshape takes a register tile with two axes; {where}", s.span, hint)
        return
    if s.into != s.source:
        scope.make_tile(Tile(s.into, "register", tile.shape, s.dtype, operand=True), s.span)


def _for(s: For, scope: Scope) -> None:
    check_scalar(s.lo, scope, Kind.INT, "the first value of a loop")
    check_scalar(s.hi, scope, Kind.INT, "the end of a loop")
    inner = scope.inner()
    inner.define(s.var, INT_SCALAR, s.span)
    check_statements(s.body, inner, top=False)
