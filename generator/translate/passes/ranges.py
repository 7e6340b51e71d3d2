"""Tile ranges: which values of a loop variable can see something, and which see everything. Reads conditions only.

Bounds are expressions of scalars, grid axes and two symbols of their own: ROW_FIRST and ROW_LAST, the rows of the block that
ask (a block, or one warpgroup of it). `rows_min(e, first, last)` and `rows_max(...)` stand for the extreme of a value
that has to be read row by row (`DocEnd[q]`): whoever emits code computes them before the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from generator.tl.ir import COLS, ROWS, Expr, Index, Num, Op, Var, names
from generator.tl.types import Rank
from generator.translate.passes.affine import Affine, affine, ceil_divide, extremum, floor_divide, sum_of, symbol, to_expr
from generator.translate.passes.conditions import AllOf, AnyOf, Condition, Limit, Opaque
from generator.translate.passes.scope import Scope

ROW_FIRST, ROW_LAST = Var("@row_first"), Var("@row_last")


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tile that is asked about: rows [first, last], columns [0, columns - 1]."""

    columns: int
    first: Expr = ROW_FIRST
    last: Expr = ROW_LAST


@dataclass(frozen=True, slots=True)
class Interval:
    """Values of the loop variable: lo <= j < hi, without gap[0] <= j < gap[1]. None: no bound on that side."""

    lo: Expr | None = None
    hi: Expr | None = None
    gap: tuple[Expr, Expr] | None = None


EVERYTHING = Interval()


def bound(e: Expr, most: bool, box: Box, scope: Scope) -> Expr | None:
    """The largest (or smallest) value of an integer expression over the box, or None where no rule knows it."""
    if scope.rank(e) is Rank.SCALAR:
        return e
    match e:
        case Var():
            if e == ROWS:
                return box.last if most else box.first
            return Num(box.columns - 1 if most else 0) if e == COLS else None
        case Index() if scope.rank(e) is Rank.ROW:
            return Op("rows_max" if most else "rows_min", (e, box.first, box.last))
        case Op("max" | "min" as fn, (a, b)):
            both = bound(a, most, box, scope), bound(b, most, box, scope)
            return None if both[0] is None or both[1] is None else extremum(fn, (both[0], both[1]))
        case Op("//" | "ceildiv" as fn, (a, Num(int() as d))) if d > 0:
            inner = bound(a, most, box, scope)
            return None if inner is None else (floor_divide if fn == "//" else ceil_divide)(inner, d)
        case Op("%", (_, Num(int() as d))) if d > 0:
            return Num(d - 1 if most else 0)
        case Op("where", (_, a, b)):
            both = bound(a, most, box, scope), bound(b, most, box, scope)
            return None if both[0] is None or both[1] is None else extremum("max" if most else "min", (both[0], both[1]))
        case Op("+" | "-" | "*" | "neg"):
            form = affine(e)
            if form is None or form == symbol(e):
                return None
            inner_form = extreme(form, most, box, scope)
            return None if inner_form is None else to_expr(inner_form)
    return None


def extreme(form: Affine, most: bool, box: Box, scope: Scope) -> Affine | None:
    """The form's largest (or smallest) value over the box, as a form of scalars: each coefficient's sign picks the end."""
    out = Affine(form.constant)
    for s, c in form.terms:
        value = bound(s, (c > 0) == most, box, scope)
        term = None if value is None else affine(value)
        if term is None:
            return None
        out = out + term * c
    return out


def solve(form: Affine, variable: str) -> Interval | None:
    """Where `form >= 0`, for the loop variable. None when the variable stands inside another symbol or not at all."""
    j = Var(variable)
    c, rest = form.coefficient(j), form.without(j)
    if c == 0 or any(variable in names(s) for s in rest.symbols):
        return None
    if c > 0:
        return Interval(lo=ceil_divide(to_expr(rest * -1), c))
    return Interval(hi=sum_of(floor_divide(to_expr(rest), -c), Num(1)))


def possible(c: Condition, variable: str, box: Box, scope: Scope) -> Interval:
    """Outside this interval the condition is false for every element of the box."""
    match c:
        case Limit(form):
            top = extreme(form, True, box, scope)
            return (solve(top, variable) if top is not None else None) or EVERYTHING
        case AllOf(parts):
            return intersect(tuple(possible(p, variable, box, scope) for p in parts))
        case AnyOf(parts):
            return _hull(tuple(possible(p, variable, box, scope) for p in parts))
        case Opaque():
            return EVERYTHING


def certain(c: Condition, variable: str, box: Box, scope: Scope) -> Interval | None:
    """Inside this interval the condition is true for every element of the box; None: nowhere for certain."""
    match c:
        case Limit(form):
            bottom = extreme(form, False, box, scope)
            return solve(bottom, variable) if bottom is not None else None
        case AllOf(parts):
            ranges = tuple(certain(p, variable, box, scope) for p in parts)
            return None if None in ranges else intersect(tuple(r for r in ranges if r is not None))
        case AnyOf(parts):
            return _certain_any(tuple(r for p in parts if (r := certain(p, variable, box, scope)) is not None))
        case Opaque():
            return None


def intersect(ranges: tuple[Interval, ...]) -> Interval:
    """What all of them hold: EVERYTHING for none."""
    los = tuple(r.lo for r in ranges if r.lo is not None)
    his = tuple(r.hi for r in ranges if r.hi is not None)
    gap = next((r.gap for r in ranges if r.gap is not None), None)
    return Interval(extremum("max", los) if los else None, extremum("min", his) if his else None, gap)


def _hull(ranges: tuple[Interval, ...]) -> Interval:
    """The smallest interval around all. Ranges that only end and ranges that only begin leave a gap between them."""
    los, his = [r.lo for r in ranges], [r.hi for r in ranges]
    lo = extremum("min", tuple(x for x in los if x is not None)) if None not in los else None
    hi = extremum("max", tuple(x for x in his if x is not None)) if None not in his else None
    below = tuple(r.hi for r in ranges if r.lo is None and r.hi is not None and r.gap is None)
    above = tuple(r.lo for r in ranges if r.hi is None and r.lo is not None and r.gap is None)
    gap = (extremum("max", below), extremum("min", above)) if below and above and len(below) + len(above) == len(ranges) else None
    return Interval(lo, hi, gap)


def _certain_any(ranges: tuple[Interval, ...]) -> Interval | None:
    """One alternative is enough. Those that bound the same side join; of two sides the lower bound stays (a window, no sink)."""
    above = tuple(r.lo for r in ranges if r.lo is not None and r.hi is None)
    below = tuple(r.hi for r in ranges if r.hi is not None and r.lo is None)
    if above:
        return Interval(lo=extremum("min", above))
    if below:
        return Interval(hi=extremum("max", below))
    return ranges[0] if ranges else None


def edge_tiles(c: Condition, variable: str, box: Box, rows: int, scope: Scope) -> int | None:
    """At most so many tiles lie between the last certain and the last possible one; None: not known, 0: no upper limit."""
    box = replace(box, first=Num(0), last=Num(rows - 1))
    match c:
        case Limit(form):
            top, bottom = extreme(form, True, box, scope), extreme(form, False, box, scope)
            coefficient = form.coefficient(Var(variable))
            if coefficient >= 0 and not any(variable in names(s) for s in form.without(Var(variable)).symbols):
                return 0
            if top is None or bottom is None or not (top - bottom).is_constant:
                return None
            return -(-(top - bottom).constant // -coefficient) if coefficient else None
        case AllOf(parts) | AnyOf(parts):
            each = [edge_tiles(p, variable, box, rows, scope) for p in parts]
            return None if None in each else max(e for e in each if e is not None)
        case Opaque():
            return None
