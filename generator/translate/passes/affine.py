"""Integer forms that are linear in symbols: what tests and tile ranges are computed with. Knows no statement and no target.

A symbol is any integer expression that is not itself a sum or a product with a constant: a variable, `DocEnd[q]`, `h // 4`,
`max(a, b)`. Two forms are equal when they have the same constant and the same coefficient for every symbol.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import Expr, Num, Op


@dataclass(frozen=True, slots=True)
class Affine:
    """`constant + sum of coefficient * symbol`; terms sorted by the symbol's text, no zero coefficients."""

    constant: int
    terms: tuple[tuple[Expr, int], ...] = ()

    def __add__(self, other: Affine) -> Affine:
        return _make(self.constant + other.constant, (*self.terms, *other.terms))

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def __mul__(self, factor: int) -> Affine:
        return _make(self.constant * factor, tuple((s, c * factor) for s, c in self.terms))

    def plus(self, constant: int) -> Affine:
        return Affine(self.constant + constant, self.terms)

    def coefficient(self, symbol: Expr) -> int:
        return next((c for s, c in self.terms if s == symbol), 0)

    def without(self, *symbols: Expr) -> Affine:
        """The form with these symbols' terms left out."""
        return Affine(self.constant, tuple((s, c) for s, c in self.terms if s not in symbols))

    @property
    def symbols(self) -> tuple[Expr, ...]:
        return tuple(s for s, _ in self.terms)

    @property
    def is_constant(self) -> bool:
        return not self.terms


def _make(constant: int, terms: tuple[tuple[Expr, int], ...]) -> Affine:
    total: dict[Expr, int] = {}
    for symbol, coefficient in terms:
        total[symbol] = total.get(symbol, 0) + coefficient
    return Affine(constant, tuple(sorted(((s, c) for s, c in total.items() if c), key=lambda t: repr(t[0]))))


def symbol(e: Expr) -> Affine:
    return Affine(0, ((e, 1),))


def affine(e: Expr) -> Affine | None:
    """The form of an integer expression, or None for one that holds a float. What is not linear is a symbol."""
    match e:
        case Num(int() as value):
            return Affine(value)
        case Num():
            return None
        case Op("+" | "-" as fn, (a, b)):
            left, right = affine(a), affine(b)
            if left is None or right is None:
                return None
            return left + right if fn == "+" else left - right
        case Op("neg", (a,)):
            form = affine(a)
            return None if form is None else form * -1
        case Op("*", (a, b)):
            left, right = affine(a), affine(b)
            if left is None or right is None:
                return None
            if left.is_constant:
                return right * left.constant
            return left * right.constant if right.is_constant else symbol(e)
    return symbol(e)


def grows_with(e: Expr, symbol: Expr) -> bool:
    """Whether some linear part of an integer expression grows with a symbol, as far as rules tell."""
    match e:
        case Op("max" | "min", args):
            return any(grows_with(a, symbol) for a in args)
        case Op("//" | "ceildiv", (a, _)):
            return grows_with(a, symbol)
    form = affine(e)
    if form is None:
        return False
    return form.coefficient(symbol) > 0 or any(c > 0 and s != e and grows_with(s, symbol) for s, c in form.terms)


def to_expr(form: Affine) -> Expr:
    """The form as an expression again, positive terms first so that it reads well."""
    out: Expr | None = None
    for s, c in sorted(form.terms, key=lambda t: t[1] < 0):
        term = s if abs(c) == 1 else Op("*", (Num(abs(c)), s))
        first = term if c > 0 else Op("neg", (term,))
        out = first if out is None else Op("+" if c > 0 else "-", (out, term))
    if out is None:
        return Num(form.constant)
    if form.constant == 0:
        return out
    return Op("+" if form.constant > 0 else "-", (out, Num(abs(form.constant))))


def sum_of(*parts: Expr) -> Expr:
    """The sum, in affine normal form."""
    total = Affine(0)
    for p in parts:
        form = affine(p)
        assert form is not None, p
        total = total + form
    return to_expr(total)


def extremum(fn: str, parts: tuple[Expr, ...]) -> Expr:
    """`max` or `min` of several expressions, equal ones once and constants folded; at least one."""
    constants = [p.value for p in parts if isinstance(p, Num)]
    rest: list[Expr] = list(dict.fromkeys(p for p in parts if not isinstance(p, Num)))
    if constants:
        rest.append(Num((max if fn == "max" else min)(constants)))
    out = rest[0]
    for p in rest[1:]:
        out = Op(fn, (out, p))
    return out


def floor_divide(e: Expr, divisor: int) -> Expr:
    """e // divisor, rounded towards minus infinity, divisor > 0."""
    if divisor == 1:
        return e
    return Num(e.value // divisor) if isinstance(e, Num) and isinstance(e.value, int) else Op("//", (e, Num(divisor)))


def ceil_divide(e: Expr, divisor: int) -> Expr:
    if divisor == 1:
        return e
    return Num(-(-e.value // divisor)) if isinstance(e, Num) and isinstance(e.value, int) else Op("ceildiv", (e, Num(divisor)))
