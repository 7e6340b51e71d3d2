"""Whole numbers that certainly do not fit the 32 bits in which kernels compute those of rows and elements. Emits nothing.

TL's whole numbers have 64 bits. What comes from arguments, loops and captured tensors is small by the matrices that it addresses,
and is trusted; what literals and the places inside a tile make alone is known here, and would wrap in silence.
"""

from __future__ import annotations

from generator.tl.ir import COLS, ROWS, Compute, Copy, Expr, For, If, Num, Op, Program, Stmt, Var, walk_statements
from generator.tl.printer import print_expression as show
from generator.tl.types import REDUCTIONS, Rank
from generator.translate.passes.scope import Scope

LEAST, MOST = -(2**31), 2**31 - 1
#: The smallest and the largest value.
Known = tuple[int, int]


def too_wide(program: Program, scope: Scope, everywhere: bool) -> tuple[str, int]:
    """What does not fit, with the cure, and its line; ("", 0) where all may fit. everywhere: a block's have 32 bits too."""
    for s in walk_statements(program.code):
        for e, rows, columns in _numbers(s, scope, everywhere):
            if (found := _wide(e, rows, columns, scope, everywhere)) is not None:
                of = "have" if everywhere else "of rows and elements have"
                return f"{show(found)}: whole numbers {of} 32 bits here; write it with floats (2.0, not 2)", s.span.line
    return "", 0


def _numbers(s: Stmt, scope: Scope, everywhere: bool) -> list[tuple[Expr, int, int]]:
    """The expressions of a statement that are looked at, with rows and columns of the tile that `rows` and `cols` count in."""
    match s:
        case Compute(into=into, value=value) if everywhere or scope.tiles[into]:
            shape = (*scope.tiles[into], 0, 0)
            return [(value, shape[0], shape[1])]
        case For(lo=lo, hi=hi) if everywhere:
            return [(lo, 0, 0), (hi, 0, 0)]
        case If(test=test) if everywhere:
            return [(test, 0, 0)]
        case Copy(coordinate=coordinate) if everywhere:
            return [(e, 0, 0) for e in coordinate]
    return []


def _wide(e: Expr, rows: int, columns: int, scope: Scope, everywhere: bool) -> Expr | None:
    """The innermost part that certainly does not fit. columns: of the tile that `cols` counts in."""
    if not isinstance(e, Op):
        return e if everywhere and _is_wide(e, rows, columns) and not scope.rank(e) else None
    inside = scope.columns(e.args[0]) if e.fn in REDUCTIONS else columns
    wholes = [a for a in e.args if scope.is_integer(a)]
    for part in e.args:
        if isinstance(part, Op) and (found := _wide(part, rows, inside, scope, everywhere)) is not None:
            return found
    if not everywhere and scope.rank(e) is Rank.SCALAR:
        return None
    if scope.is_integer(e):
        parts = [e, *wholes]
    else:  # two whole numbers that are compared; one that meets a float becomes one
        parts = wholes if len(wholes) == len(e.args) > 1 and (everywhere or any(scope.rank(a) for a in wholes)) else []
    return next((part for part in parts if _is_wide(part, rows, inside)), None)


def _is_wide(e: Expr, rows: int, columns: int) -> bool:
    known = _known(e, rows, columns)
    return known is not None and not LEAST <= known[0] <= known[1] <= MOST


def _known(e: Expr, rows: int, columns: int) -> Known | None:
    """The range of a whole number made of literals and places inside the tile; None of any other."""
    match e:
        case Num(int() as value):
            return value, value
        case Var():
            return (0, rows - 1) if e == ROWS else (0, max(0, columns - 1)) if e == COLS else None
        case Op("+" | "-" | "*" | "max" | "min" as fn, (a, b)):
            left, right = _known(a, rows, columns), _known(b, rows, columns)
            if left is None or right is None:
                return None
            ends = [_apply(fn, x, y) for x in left for y in right]
            return min(ends), max(ends)
        case Op("neg", (a,)):
            inner = _known(a, rows, columns)
            return None if inner is None else (-inner[1], -inner[0])
    return None


def _apply(fn: str, x: int, y: int) -> int:
    match fn:
        case "+":
            return x + y
        case "-":
            return x - y
        case "*":
            return x * y
        case "max":
            return max(x, y)
    assert fn == "min", fn
    return min(x, y)
