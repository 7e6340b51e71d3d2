"""What an iteration of an online softmax comes to where no row's reference moves: no maximum, no rescaling. Emits nothing.

The step is recognised in its written-out form, whatever its names are (c may be missing, and P may be 2 to the (S - B) * c):

    X = max(R, rowmax(S));  X = where(test, R, Y);  B = where(X != -inf, X, 0.0);  F = exp2((R - B) * c);  R = X
    P = exp2(S * c - B * c);  v = v * F + rowsum(P);  acc = acc * F;  Reshape P ... and get PA

Every carried tile but R is rescaled by F, and nothing else reads R: which reference a row has is then a matter of rounding. c is
positive, so that weights are infinite, or NaN, where R is -inf.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from generator.tl.fold import substitute
from generator.tl.ir import NEG_INF, Compute, Expr, For, Gemm, If, Num, Op, Program, Reshape, Stmt, Var, names
from generator.translate.passes.scope import Scope, carried, defs, uses

ZERO = Num(0.0)


@dataclass(frozen=True, slots=True)
class Kept:
    """An iteration in which every row keeps its reference.

    reference: R. operand: PA, what the weights are for the products. code: what is left of the code between the products, for
    rows whose reference is finite; it gives what the whole body gives where the test holds. sums: the row sums in it.
    """

    reference: str
    operand: str
    code: tuple[Stmt, ...]
    sums: tuple[str, ...]


def kept(loop: For, program: Program, scope: Scope) -> Kept | None:
    """The iteration without maxima: with `Option row_maxima = on_demand`, where the body is such a step and nothing more."""
    if program.options["row_maxima"] != "on_demand" or any(isinstance(s, For | If) for s in loop.body):
        return None
    state = carried(loop.body)
    moves = [s for s in loop.body if isinstance(s, Compute) and isinstance(s.value, Var) and s.into in state]
    reshapes = [s for s in loop.body if isinstance(s, Reshape)]
    if len(moves) != 1 or len(reshapes) != 1 or not isinstance(moves[0].value, Var):
        return None
    return _Step(loop.body, scope, state, moves[0].into, moves[0].value.name, reshapes[0]).kept()


@dataclass(frozen=True, slots=True)
class _Exponent:
    """P = fn((S - B) * c), with the product written out or not; c None where there is none."""

    fn: str
    scores: str
    base: str
    factor: Expr | None


def _exponent(value: Expr | None) -> _Exponent | None:
    match value:
        case Op("exp2" | "exp" as fn, (Op("-", (Op("*", (Var(s), c)), Op("*", (Var(b), d)))),)) if c == d:
            return _Exponent(fn, s, b, c)
        case Op("exp2" | "exp" as fn, (Op("*", (Op("-", (Var(s), Var(b))), c)),)):
            return _Exponent(fn, s, b, c)
        case Op("exp2" | "exp" as fn, (Op("-", (Var(s), Var(b))),)):
            return _Exponent(fn, s, b, None)
    return None


@dataclass(frozen=True, slots=True)
class _Step:
    body: tuple[Stmt, ...]
    scope: Scope
    state: tuple[str, ...]
    reference: str
    chosen: str  # X
    reshape: Reshape

    def positions(self, name: str) -> list[int]:
        """Where a tile is written."""
        return [i for i, s in enumerate(self.body) if name in defs(s)]

    def value(self, position: int) -> Expr | None:
        s = self.body[position]
        return s.value if isinstance(s, Compute) else None

    def only(self, name: str) -> Expr | None:
        """The value of a tile that one statement writes."""
        found = self.positions(name)
        return self.value(found[0]) if len(found) == 1 else None

    def kept(self) -> Kept | None:
        e = _exponent(self.only(self.reshape.source))
        if e is None or (e.factor is not None and not self._positive(e.factor)):
            return None
        if self.only(e.base) != Op("where", (Op("!=", (Var(self.chosen), NEG_INF)), Var(self.chosen), ZERO)):
            return None
        distance: Expr = Op("-", (Var(self.reference), Var(e.base)))
        rescale_by = Op(e.fn, (Op("*", (distance, e.factor)) if e.factor is not None else distance,))
        factors = [s.into for s in self.body if isinstance(s, Compute) and s.value == rescale_by]
        if len(factors) != 1 or len(self.positions(factors[0])) != 1:
            return None
        if not (self._chooses(e.scores) and self._in_order(e, factors[0]) and self._rescales(factors[0])):
            return None
        return self._left(e, factors[0])

    def _positive(self, e: Expr) -> bool:
        match e:
            case Num(value):
                return value > 0
            case Var(name):
                return name in self.scope.promised
            case Op("*" | "/", args):
                return all(map(self._positive, args))
        return False

    def _chooses(self, scores: str) -> bool:
        """X is the maximum so far, or stays R."""
        found = [self.value(i) for i in self.positions(self.chosen)]
        match found:
            case [first, Op("where", (test, Var(kept), other))]:
                tiles = {n for e in (test, other) for n in names(e) if n in self.scope.tiles}
                greatest = Op("max", (Var(self.reference), Op("rowmax", (Var(scores),))))
                return first == greatest and kept == self.reference and tiles <= {self.reference, self.chosen}
        return False

    def _in_order(self, e: _Exponent, factor: str) -> bool:
        """Every name has the value that the form means, and is read by the form alone."""
        weights, x = self.reshape.source, self.positions(self.chosen)
        first, second = x
        base, moved = self.positions(e.base)[0], self.positions(self.reference)
        scaled, made = self.positions(factor)[0], self.positions(weights)[0]
        order = [max(self.positions(e.scores)), first, second, base, scaled, *moved]
        readers = {self.reference: {first, second, scaled}, self.chosen: {second, base, *moved}, e.base: {scaled, made}}
        alone = all(i in at for name, at in readers.items() for i, s in enumerate(self.body) if name in uses(s))
        late = [i for i, s in enumerate(self.body) if factor in uses(s) or (weights in uses(s) and s is not self.reshape)]
        return (
            order == sorted(set(order))
            and alone
            and base < made < self.body.index(self.reshape)
            and all(i > max(scaled, made if weights in uses(self.body[i]) else 0) for i in late)
        )

    def _rescales(self, factor: str) -> bool:
        """Every carried tile but R is rescaled once, and then added to from the weights alone."""
        operand, total = self.reshape.into, Op("rowsum", (Var(self.reshape.source),))
        for name in (n for n in self.state if n != self.reference):
            scaled = Op("*", (Var(name), Var(factor)))
            for i in self.positions(name):
                s = self.body[i]
                if isinstance(s, Gemm) and not (s.accumulate and s.a == operand):
                    return False
                if isinstance(s, Compute) and s.value not in (scaled, Op("+", (scaled, total))):
                    return False
            if sum(isinstance(self.body[i], Compute) for i in self.positions(name)) != 1:
                return False
        read = {i for i, s in enumerate(self.body) if factor in uses(s)}
        return read <= {i for n in self.state for i in self.positions(n)}

    def _left(self, e: _Exponent, factor: str) -> Kept:
        total, gone = Op("rowsum", (Var(self.reshape.source),)), {self.reference, self.chosen, e.base, factor}
        code: list[Stmt] = []
        sums = []
        for s in self.body:
            match s:
                case Compute(into=into) if into in gone:
                    pass
                case Compute(into=into, value=Op("+", (_, last))) if into in self.state and last == total:
                    code.append(replace(s, value=Op("+", (Var(into), total))))
                    sums.append(into)
                case Compute(into=into) if into in self.state:
                    pass
                case Compute():
                    code.append(replace(s, value=substitute(s.value, {e.base: Var(self.reference)})))
                case Reshape():
                    code.append(s)
        return Kept(self.reference, self.reshape.into, tuple(self._joined(code, e)), tuple(sums))

    def _joined(self, code: list[Stmt], e: _Exponent) -> list[Stmt]:
        """The reference taken off what is added to the scores, S = S * c + t, where nothing but masks stands in between."""
        wide = {n for n, shape in self.scope.tiles.items() if len(shape) == 2}
        scores = [s for s in code if isinstance(s, Compute) and s.into == e.scores and not self._masks(s, e.scores)]
        match scores[-1:]:
            case [Compute(value=Op("+", (a, t))) as last] if e.factor is None and not names(t) & wide:
                less = replace(last, value=Op("+", (a, Op("-", (t, Var(self.reference))))))
                return [less if s is last else self._of_scores(s, e) for s in code]
        return code

    def _of_scores(self, s: Stmt, e: _Exponent) -> Stmt:
        if isinstance(s, Compute) and s.into == self.reshape.source:
            return replace(s, value=Op(e.fn, (Var(e.scores),)))
        return s

    @staticmethod
    def _masks(s: Stmt, scores: str) -> bool:
        match s:
            case Compute(value=Op("where", (_, Var(name), other))):
                return name == scores and other == NEG_INF
        return False
