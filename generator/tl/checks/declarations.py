"""Lines that declare: every one by itself. What the statements do with what is declared is checked in `statements.py`."""

from __future__ import annotations

from typing import assert_never

from generator.tl.checks.expressions import check_expression, check_scalar, check_value
from generator.tl.checks.names import Scope
from generator.tl.expand import MAX_DEPTH, MAX_NODES, sizes, too_large
from generator.tl.expressions import did_you_mean
from generator.tl.ir import (
    DTYPES,
    HINTS,
    OPTIONS,
    Allocate,
    Argument,
    Constant,
    Declaration,
    Expr,
    Grid,
    Hint,
    Let,
    Option,
    Var,
    walk,
)
from generator.tl.types import Kind, Rank, Tile, Typing, kind_of_dtype

INT_SCALAR = Typing(Rank.SCALAR, Kind.INT)


def check_declaration(s: Declaration, scope: Scope) -> None:
    """Report what is wrong with a declaration, and define what it declares."""
    match s:
        case Argument():
            _argument(s, scope)
        case Constant():
            if len(set(s.choices)) < len(s.choices):
                scope.report.error("duplicate-name", f"{s.name} has a choice twice", s.span, "list each choice once")
            scope.define(s.name, INT_SCALAR, s.span)
        case Grid():
            _grid(s, scope)
        case Let():
            _let(s, scope)
        case Allocate():
            _allocate(s, scope)
        case Hint():
            _hint(s, scope)
        case Option():
            _option(s, scope)
        case _:
            assert_never(s)


def _argument(s: Argument, scope: Scope) -> None:
    if s.dtype not in ("f32", "i32"):
        hint = "f32 for numbers, i32 for sizes; a matrix is declared by Allocate ... in global"
        scope.report.error("dtype", f"an argument is f32 or i32, found {s.dtype}", s.span, hint, "f32 or i32", s.dtype)
    for name in s.names:
        scope.define(name, Typing(Rank.SCALAR, kind_of_dtype(s.dtype)), s.span)
    if not s.positive:
        scope.unpromised |= set(s.names)


def _grid(s: Grid, scope: Scope) -> None:
    if "Grid line" in scope.places:
        scope.report.error("duplicate-name", "there is a second Grid", s.span, "give one Grid all its axes")
    scope.places["Grid line"] = s.span
    for axis in s.axes:
        check_scalar(axis.extent, scope, Kind.INT, f"the extent of {axis.name}")
    for axis in s.axes:
        scope.define(axis.name, INT_SCALAR, axis.span)


def _let(s: Let, scope: Scope) -> None:
    typing = check_expression(s.value, scope)
    scope.let_sizes[s.name] = nodes, depth = sizes(s.value, scope.let_sizes)
    if nodes > MAX_NODES or depth > MAX_DEPTH:
        scope.report.found.append(too_large(s.name, s.span))
        scope.let_sizes[s.name] = (1, 1)
        typing = None
    if any(isinstance(e, Var) and e.name in scope.tiles for e in walk(s.value)):
        hint = "store it by Compute if the value of this moment is meant"
        scope.report.warning("let-of-tile", f"{s.name} reads a tile, each time that {s.name} is used", s.span, hint)
    scope.define(s.name, typing, s.span)


def _allocate(s: Allocate, scope: Scope) -> None:
    for e in s.shape:
        check_scalar(e, scope, Kind.INT, f"an extent of {s.name}")
    for e in s.offset:
        check_scalar(e, scope, Kind.INT, f"the offset of {s.name}")
    if s.dtype not in DTYPES:
        scope.report.error("dtype", f"{s.dtype} is no dtype", s.span, "", ", ".join(DTYPES), s.dtype)
    if s.level == "global":
        _matrix(s, scope)
        return
    if s.offset:
        scope.report.error("level", "only a matrix in global memory has an offset", s.span, "leave the offset out")
    if not 1 <= len(s.shape) <= 2:
        hint = f"write Allocate {s.name} in {s.level} (ROWS, COLUMNS), or (ROWS) for one value a row"
        scope.report.error("shape", f"a tile has one or two axes, found {len(s.shape)}", s.span, hint)
        return
    tile = Tile(s.name, s.level, s.shape, s.dtype)
    if s.init is not None:
        _initial(s, s.init, tile, scope)
    scope.allocate_tile(tile, s.span)


def _matrix(s: Allocate, scope: Scope) -> None:
    if len(s.shape) > 2:
        hint = "leading axes go into the offset: with offset [b, h]"
        scope.report.error("shape", f"a block sees at most two axes of a matrix, found {len(s.shape)}", s.span, hint)
    if s.init is not None:
        scope.report.error("level", "a matrix in global memory has no initial value", s.span, "only tiles in registers have one")
    scope.define_matrix(s)


def _initial(s: Allocate, init: Expr, tile: Tile, scope: Scope) -> None:
    if s.level != "register":
        scope.report.error("level", f"a tile in {s.level} memory has no initial value", s.span, "allocate it in register")
    check_value(init, scope, tile.typing.rank, tile.typing.kind, s.name)


def _hint(s: Hint, scope: Scope) -> None:
    _once(s, scope)
    if s.name not in HINTS:
        hint = did_you_mean(s.name, HINTS) or f"known: {', '.join(HINTS)}"
        scope.report.warning("unknown-hint", f"nothing reads the hint {s.name}", s.span, hint)


def _once(s: Hint | Option, scope: Scope) -> None:
    key = f"{type(s).__name__} {s.name}"  # no name of a program holds a space
    if key in scope.places:
        line = scope.places[key].line
        scope.report.error("duplicate-name", f"{key} is stated already (line {line})", s.span, "state it once", found=s.name)
    scope.places[key] = s.span


def _option(s: Option, scope: Scope) -> None:
    _once(s, scope)
    if s.name not in OPTIONS:
        hint = did_you_mean(s.name, OPTIONS) or f"the options are {', '.join(OPTIONS)}"
        scope.report.error("unknown-name", f"{s.name} is no numeric option", s.span, hint, ", ".join(OPTIONS), s.name)
    elif s.value not in OPTIONS[s.name]:
        allowed = ", ".join(OPTIONS[s.name])
        message = f"{s.name} = {s.value} is no choice"
        scope.report.error("unknown-name", message, s.span, f"write one of {allowed}", allowed, s.value)
