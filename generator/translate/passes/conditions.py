"""Tests as conditions on integer forms, and the two tile ranges that follow: where something can be true, and where all is.

`kv < max(Prefix, q + 1)` becomes `kv < Prefix or kv < q + 1`: a form is monotone in a max or min inside it, so a comparison opens
into AnyOf or AllOf of linear comparisons. What does not open is Opaque and restricts no range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from generator.tl.ir import COLS, Expr, Num, Op, names
from generator.tl.types import Rank
from generator.translate.passes.affine import Affine, affine
from generator.translate.passes.scope import Scope


@dataclass(frozen=True, slots=True)
class Limit:
    """`form >= 0`."""

    form: Affine


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every part."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one part."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """A test that is evaluated as written, element by element."""

    expr: Expr


Condition: TypeAlias = Limit | AllOf | AnyOf | Opaque


def conjuncts(e: Expr) -> tuple[Expr, ...]:
    """The tests that a test is the conjunction of."""
    return tuple(c for a in e.args for c in conjuncts(a)) if isinstance(e, Op) and e.fn == "and" else (e,)


def condition(e: Expr, scope: Scope) -> Condition:
    """What a test says about integers."""
    match e:
        case Op("and", args):
            return _all(tuple(condition(a, scope) for a in args))
        case Op("or", args):
            return _any(tuple(condition(a, scope) for a in args))
        case Op("not", (a,)):
            return condition(negated, scope) if (negated := negate(a, scope)) != e else Opaque(e)
        case Op("<" | "<=" | ">" | ">=" | "==" as fn, (a, b)) if scope.is_integer(a) and scope.is_integer(b):
            left, right = affine(a), affine(b)
            assert left is not None and right is not None
            match fn:
                case "<":
                    return _open((right - left).plus(-1), scope)
                case "<=":
                    return _open(right - left, scope)
                case ">":
                    return _open((left - right).plus(-1), scope)
                case ">=":
                    return _open(left - right, scope)
                case _:
                    return _all((_open(left - right, scope), _open(right - left, scope)))
    return Opaque(e)


INVERSE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def negate(e: Expr, scope: Scope) -> Expr:
    """The opposite of a test, pushed down to comparisons of integers; floats keep their `not`, since NaN compares false."""
    match e:
        case Op("and", args):
            return Op("or", tuple(negate(a, scope) for a in args))
        case Op("or", args):
            return Op("and", tuple(negate(a, scope) for a in args))
        case Op("not", (a,)):
            return a
        case Op(fn, (a, b)) if fn in INVERSE and ((scope.is_integer(a) and scope.is_integer(b)) or fn in ("==", "!=")):
            return Op(INVERSE[fn], (a, b))
    return Op("not", (e,))


def _all(parts: tuple[Condition, ...]) -> Condition:
    flat = tuple(q for p in parts for q in (p.parts if isinstance(p, AllOf) else (p,)))
    return flat[0] if len(flat) == 1 else AllOf(flat)


def _any(parts: tuple[Condition, ...]) -> Condition:
    flat = tuple(q for p in parts for q in (p.parts if isinstance(p, AnyOf) else (p,)))
    return flat[0] if len(flat) == 1 else AnyOf(flat)


def _open(form: Affine, scope: Scope) -> Condition:
    """`form >= 0` with every max and min, and every floor division of a column, opened."""
    for symbol, coefficient in form.terms:
        rest = form.without(symbol)
        match symbol:
            case Op("max" | "min" as fn, (a, b)):
                choices = [affine(a), affine(b)]
                assert choices[0] is not None and choices[1] is not None
                parts = tuple(_open(rest + c * coefficient, scope) for c in choices if c is not None)
                return _any(parts) if (fn == "max") == (coefficient > 0) else _all(parts)
            case Op("//" | "ceildiv" as fn, (a, Num(int() as d))) if (
                d > 0 and abs(coefficient) == 1 and _has_column(symbol, scope)
            ):
                return _open(_without_division(fn, a, d, coefficient, rest), scope)
    return Limit(form)


def _without_division(fn: str, a: Expr, d: int, coefficient: int, rest: Affine) -> Affine:
    """a // d >= x is a >= d x; x >= a // d is d x + d - 1 >= a. ceildiv(a, d) is (a + d - 1) // d."""
    inner = affine(a)
    assert inner is not None
    if fn == "ceildiv":
        inner = inner.plus(d - 1)
    return inner + rest * d if coefficient > 0 else (rest * d).plus(d - 1) - inner


def _has_column(e: Expr, scope: Scope) -> bool:
    return bool(scope.rank(e) & Rank.COL)


def is_column_limit(form: Affine, scope: Scope) -> bool:
    """Linear in the column with coefficient 1 or -1, everything else the same along a row: `lo <= column < hi` of one row."""
    return abs(form.coefficient(COLS)) == 1 and not any(scope.rank(s) & Rank.COL for s in form.symbols if s != COLS)


def limits(c: Condition) -> tuple[Affine, ...]:
    """Every form of a condition."""
    match c:
        case Limit():
            return (c.form,)
        case AllOf() | AnyOf():
            return tuple(f for p in c.parts for f in limits(p))
        case Opaque():
            return ()


def mentions(c: Condition, variable: str) -> bool:
    """Whether a form of the condition holds the variable."""
    return any(variable in names(s) for f in limits(c) for s in f.symbols)
