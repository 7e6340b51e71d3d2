"""Whole numbers that certainly do not fit the 32 bits in which kernels compute those of rows and elements. Emits nothing.

TL's whole numbers have 64 bits. What comes from arguments, loops and captured tensors is small by the matrices that it addresses,
and is trusted; what literals and the places inside a tile make alone is known here, and would wrap in silence.
"""

from __future__ import annotations

from generator.tl.ir import COLS, ROWS, Compute, Expr, Num, Op, Program, Var, walk_statements
from generator.tl.printer import print_expression as show
from generator.tl.types import REDUCTIONS, Rank
from generator.translate.passes.scope import Scope

LEAST, MOST = -(2**31), 2**31 - 1
#: The smallest and the largest value.
Known = tuple[int, int]


def too_wide(program: Program, scope: Scope) -> tuple[str, int]:
    """What does not fit, with the cure, and its line; ("", 0) where all may fit."""
    for s in walk_statements(program.code):
        if isinstance(s, Compute) and scope.tiles[s.into]:
            shape = scope.tiles[s.into]
            if (found := _wide(s.value, shape[0], shape[1] if len(shape) == 2 else 0, scope)) is not None:
                message = f"{show(found)}: whole numbers of rows and elements have 32 bits; write it with floats (2.0, not 2)"
                return message, s.span.line
    return "", 0


def _wide(e: Expr, rows: int, columns: int, scope: Scope) -> Expr | None:
    """The innermost part that certainly does not fit. columns: of the tile that `cols` counts in."""
    if isinstance(e, Op):
        inside = scope.columns(e.args[0]) if e.fn in REDUCTIONS else columns
        for part in e.args:
            if (found := _wide(part, rows, inside, scope)) is not None:
                return found
        wholes = [a for a in e.args if scope.is_integer(a)] if len(e.args) > 1 else []
        if scope.rank(e) is not Rank.SCALAR:
            for part in (e, *wholes) if scope.is_integer(e) else wholes if any(scope.rank(a) for a in wholes) else []:
                known = _known(part, rows, inside)
                if known is not None and not LEAST <= known[0] <= known[1] <= MOST:
                    return part
    return None


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
