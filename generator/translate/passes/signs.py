"""Sign sets: which of nan, -inf, negative, 0, positive and +inf a value can be, and what functions make of them.

Knows no program.

Arithmetic on finite values is taken as finite (no overflow): a program that overflows has no defined value anyway.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from enum import IntFlag
from itertools import product


class Signs(IntFlag):
    """A set of possibilities for one number, or for one test (TRUE, FALSE)."""

    NONE = 0
    NAN = 1
    NEG_INF = 2
    NEG = 4
    ZERO = 8
    POS = 16
    POS_INF = 32
    TRUE = 64
    FALSE = 128
    FINITE = NEG | ZERO | POS
    ANY = NAN | NEG_INF | FINITE | POS_INF
    EITHER = TRUE | FALSE


S = Signs
ATOMS = (S.NAN, S.NEG_INF, S.NEG, S.ZERO, S.POS, S.POS_INF)
ORDER = {S.NEG_INF: 0, S.NEG: 1, S.ZERO: 2, S.POS: 3, S.POS_INF: 4}


def atoms(s: Signs) -> list[Signs]:
    """The single possibilities of a set."""
    return [a for a in (*ATOMS, S.TRUE, S.FALSE) if s & a]


def of_number(value: int | float) -> Signs:
    if math.isnan(value):
        return S.NAN
    if math.isinf(value):
        return S.POS_INF if value > 0 else S.NEG_INF
    return S.ZERO if value == 0 else S.POS if value > 0 else S.NEG


def is_finite(s: Signs) -> bool:
    return bool(s) and not s & ~S.FINITE


def _negative(a: Signs) -> Signs:
    return {S.NEG_INF: S.POS_INF, S.POS_INF: S.NEG_INF, S.NEG: S.POS, S.POS: S.NEG}.get(a, a)


def _add(a: Signs, b: Signs) -> Signs:
    if S.NAN in (a, b) or {a, b} == {S.NEG_INF, S.POS_INF}:
        return S.NAN
    for infinite in (S.NEG_INF, S.POS_INF):
        if infinite in (a, b):
            return infinite
    if a == S.ZERO or a == b:
        return b
    return a if b == S.ZERO else S.FINITE


def _times(a: Signs, b: Signs) -> Signs:
    if S.NAN in (a, b):
        return S.NAN
    infinite = {a, b} & {S.NEG_INF, S.POS_INF}
    if S.ZERO in (a, b):
        return S.NAN if infinite else S.ZERO
    negative = (a in (S.NEG, S.NEG_INF)) != (b in (S.NEG, S.NEG_INF))
    if infinite:
        return S.NEG_INF if negative else S.POS_INF
    return (S.NEG if negative else S.POS) | S.ZERO if not (a == b == S.POS) else S.POS


def _over(a: Signs, b: Signs) -> Signs:
    if S.NAN in (a, b):
        return S.NAN
    if b in (S.NEG_INF, S.POS_INF):
        return S.NAN if a in (S.NEG_INF, S.POS_INF) else S.ZERO
    if b == S.ZERO:
        return S.NAN if a == S.ZERO else S.NEG_INF | S.POS_INF
    if a == S.ZERO:
        return S.ZERO
    return _times(a, b)


def _larger(a: Signs, b: Signs) -> Signs:
    if S.NAN in (a, b):
        return a | b  # some machines return the number, some the NaN
    return a if ORDER[a] >= ORDER[b] else b


def _smaller(a: Signs, b: Signs) -> Signs:
    return _negative(_larger(_negative(a), _negative(b))) if S.NAN not in (a, b) else a | b


def _less(a: Signs, b: Signs, fn: str) -> Signs:
    if S.NAN in (a, b):
        return S.TRUE if fn == "!=" else S.FALSE
    if a == b and a in (S.NEG, S.POS):
        return S.EITHER
    x, y = ORDER[a], ORDER[b]
    answers = {"<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "==": x == y, "!=": x != y}
    return S.TRUE if answers[fn] else S.FALSE


UNARY: dict[str, dict[Signs, Signs]] = {
    "exp": {S.NEG_INF: S.ZERO, S.NEG: S.ZERO | S.POS, S.ZERO: S.POS, S.POS: S.POS, S.POS_INF: S.POS_INF},
    "log": {S.NEG_INF: S.NAN, S.NEG: S.NAN, S.ZERO: S.NEG_INF, S.POS: S.FINITE, S.POS_INF: S.POS_INF},
    "sqrt": {S.NEG_INF: S.NAN, S.NEG: S.NAN, S.ZERO: S.ZERO, S.POS: S.POS, S.POS_INF: S.POS_INF},
    "tanh": {S.NEG_INF: S.NEG, S.NEG: S.NEG | S.ZERO, S.ZERO: S.ZERO, S.POS: S.POS | S.ZERO, S.POS_INF: S.POS},
    "abs": {S.NEG_INF: S.POS_INF, S.NEG: S.POS, S.ZERO: S.ZERO, S.POS: S.POS, S.POS_INF: S.POS_INF},
    "floor": {S.NEG_INF: S.NEG_INF, S.NEG: S.NEG, S.ZERO: S.ZERO, S.POS: S.POS | S.ZERO, S.POS_INF: S.POS_INF},
}
UNARY["exp2"], UNARY["log2"] = UNARY["exp"], UNARY["log"]
BINARY = {"+": _add, "*": _times, "/": _over, "max": _larger, "min": _smaller}


def apply(fn: str, args: tuple[Signs, ...]) -> Signs:
    """What a function gives on sets; ANY (or EITHER) where no rule knows it."""
    match fn, args:
        case "neg", (a,):
            return _union(_negative(x) for x in atoms(a))
        case "-", (a, b):
            return apply("+", (a, apply("neg", (b,))))
        case (("+" | "*" | "/" | "max" | "min"), (a, b)):
            return _union(BINARY[fn](x, y) for x, y in product(atoms(a), atoms(b)))
        case (("<" | "<=" | ">" | ">=" | "==" | "!="), (a, b)):
            return _union(_less(x, y, fn) for x, y in product(atoms(a), atoms(b)))
        case "and", _:
            return S.FALSE if S.FALSE in args else S.TRUE if all(a == S.TRUE for a in args) else S.EITHER
        case "or", _:
            return S.TRUE if S.TRUE in args else S.FALSE if all(a == S.FALSE for a in args) else S.EITHER
        case "not", (a,):
            return {S.TRUE: S.FALSE, S.FALSE: S.TRUE}.get(a, S.EITHER)
        case (("//" | "%" | "ceildiv"), (a, b)):
            return S.FINITE if is_finite(a) and is_finite(b) else S.ANY
        case "rowmax", (a,):
            return a
        case "rowsum", (a,):
            return _union(_add(x, y) for x, y in product(atoms(a), atoms(a)))
        case _, (a,) if fn in UNARY:
            return _union(UNARY[fn].get(x, S.NAN) for x in atoms(a))
    return S.ANY


def _union(parts: Iterable[Signs]) -> Signs:
    return functools.reduce(operator.or_, parts, S.NONE)


def refine(s: Signs, fn: str, other: Signs, holds: bool) -> Signs:
    """What remains of s when `s fn other` is known to hold (or not), other being a single possibility."""
    wanted = S.TRUE if holds else S.FALSE
    return _union(a for a in atoms(s) if any(_less(a, b, fn) & wanted for b in atoms(other)))
