"""Values of element-wise code, each subexpression at the rank of its variables: once, once a row, or in the element loop.

Index expressions stay linear: an element's value is its row's value plus a compile-time constant. Whole numbers up to 2^24 meet
floats exactly. Row reductions are values of a row. Writes no statement (`elementwise`).
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.tl.ir import COLS, ROWS, Expr, Index, Num, Op, Var
from generator.tl.types import Kind, Rank
from generator.translate.cuda import names as mangle
from generator.translate.cuda.element_tests import ElementTests, Part
from generator.translate.cuda.scalars import INFIX, number, whole
from generator.translate.passes.affine import Affine, affine, to_expr

GLOBAL_ROW = "(row0 + ROW(t, r))"
FLOAT_ONLY = frozenset({"/", "exp", "exp2", "log", "log2", "sqrt", "tanh"})


@dataclass
class ElementValues(ElementTests):
    """Of one statement: what its value reads, as C at the rank where it is wanted."""

    def hoist(self, e: Expr, kind: Kind) -> str:
        """The name of a value computed once (rank 0) or once a row, as a float or a whole number."""
        key = (e, kind)
        if key not in self.memo:
            x, c_type = self.code.temporary(), "float" if kind is Kind.FLOAT else "int" if kind is Kind.INT else "bool"
            if self.scope.rank(e) is Rank.SCALAR:
                self.before.append(f"const {c_type} {x} = {self.code.scalars.text(e, kind)};")
                self.memo[key] = x
            else:
                value = self._raw_row(e, kind)
                self.before += [f"{c_type} {x}[MT][2];", f"FOR_ROWS {x}[t][r] = {value};"]
                self.memo[key] = f"{x}[t][r]"
        return self.memo[key]

    def row(self, e: Expr, kind: Kind = Kind.FLOAT) -> str:
        """C inside a FOR_ROWS loop."""
        if self.scope.rank(e) is Rank.SCALAR and not isinstance(e, Num):
            return self.hoist(e, kind)
        return self._raw_row(e, kind)

    def _raw_row(self, e: Expr, kind: Kind) -> str:
        own = self.kind(e)
        if kind is Kind.FLOAT and own is Kind.INT:
            return number(e.value) if isinstance(e, Num) else f"(float)({self._raw_row(e, Kind.INT)})"
        match e:
            case Num(value):
                return str(value) if own is Kind.INT else number(value)
            case Var(name):
                if e == ROWS:
                    return GLOBAL_ROW
                return f"{mangle.tile(name)}[t][r]" if name in self.scope.tiles else self.code.scalars.text(e)
            case Index(tensor, indices):
                return self.code.scalars.captured(tensor, [self.row(i, Kind.INT) for i in indices])
            case Op("rowmax" | "rowsum"):
                return self.reduce(e)
        return self._combine(e, own, self.row)

    def _combine(self, e: Expr, own: Kind, part: Part) -> str:
        """A function of parts that `part(expression, kind)` writes out."""
        assert isinstance(e, Op)
        match e:
            case Op("where", (test, a, b)):
                chosen = self.condition(test, part)
                if chosen in ("true", "false"):
                    return part(a if chosen == "true" else b, own)
                return f"({chosen} ? {part(a, own)} : {part(b, own)})"
            case Op("not", (a,)):
                return f"!({part(a, Kind.BOOL)})"
            case Op("and" | "or" as fn, (a, b)):
                return f"({part(a, Kind.BOOL)} {INFIX[fn]} {part(b, Kind.BOOL)})"
            case Op(fn, args) if all(self.kind(a) is Kind.INT for a in args) and fn not in FLOAT_ONLY:
                return whole(fn, [part(a, Kind.INT) for a in args])
            case Op("/", (a, b)) if self.code.scalars.functions.fast and self.scope.rank(b) < self.scope.rank(a):
                return f"({part(a, Kind.FLOAT)} * {self.hoist(Op('/', (Num(1.0), b)), Kind.FLOAT)})"
            case Op(fn, args):
                return self.code.scalars.functions.call(fn, [part(a, Kind.FLOAT) for a in args])

    def element(self, e: Expr, kind: Kind = Kind.FLOAT) -> str:
        """C inside a FOR_TILE loop."""
        rank, own = self.scope.rank(e), self.kind(e)
        if isinstance(e, Num):
            return number(e.value) if kind is Kind.FLOAT else str(e.value)
        if not rank & Rank.COL:
            return f"{mangle.tile(e.name)}[t][r]" if isinstance(e, Var) and e.name in self.scope.tiles else self.hoist(e, kind)
        if own is Kind.INT:
            return self._element_int(e, kind)
        if (scaled := self._scaled_index(e)) is not None:
            return scaled
        match e:
            case Var(name):
                return self._tile_element(name)
            case Index(tensor, indices):
                return self.code.scalars.captured(tensor, [self.element(i, Kind.INT) for i in indices])
        return self._combine(e, own, self.element)

    def _tile_element(self, name: str) -> str:
        if name in self.code.shared:
            return self.code.shared[name].format(r="(warp_row + (lane >> 2) + ROW(t, r))", c="(lane_col + COL)")
        return f"{mangle.tile(name)}[t][AT]"

    def _element_int(self, e: Expr, kind: Kind) -> str:
        """A whole number that varies along the row; as a float, its operations are done on floats."""
        form = affine(e)
        if form is not None and form.coefficient(COLS) and self._is_linear(form):
            return self._linear(form, kind)
        if isinstance(e, Index):
            text = self.code.scalars.captured(e.tensor, [self.element(i, Kind.INT) for i in e.indices])
            return f"(float)({text})" if kind is Kind.FLOAT else text
        assert isinstance(e, Op)
        if kind is Kind.FLOAT and e.fn in ("+", "-", "*", "neg", "max", "min", "abs"):
            return self.code.scalars.functions.call(e.fn, [self.element(a, Kind.FLOAT) for a in e.args])
        text = self._combine(e, Kind.INT, self.element)
        return f"(float)({text})" if kind is Kind.FLOAT else text

    def _is_linear(self, form: Affine) -> bool:
        return not any(self.scope.rank(s) & Rank.COL for s in form.symbols if s != COLS)

    def _linear(self, form: Affine, kind: Kind) -> str:
        """c * column + a value of the row, which includes the lane's first column."""
        c, rest = form.coefficient(COLS), to_expr(form.without(COLS))
        key = ("linear", rest, c, kind)
        if key not in self.memo:
            x = self.code.temporary()
            c_type, convert = ("float", "(float)") if kind is Kind.FLOAT else ("int", "")
            self.before += [
                f"{c_type} {x}[MT][2];",
                f"FOR_ROWS {x}[t][r] = {convert}({self.row(rest, Kind.INT)} + {c} * lane_col);",
            ]
            self.memo[key] = f"{x}[t][r]"
        offset = f"{c} * COL" if c != 1 else "COL"
        return f"({self.memo[key]} + {'(float)' if kind is Kind.FLOAT else ''}({offset}))"

    def _scaled_index(self, e: Expr) -> str | None:
        """value * index, less a row's value where one is taken off: one product a row and one multiply-add an element.

        value: the same along the row.
        """
        taken: Expr | None = None
        product = e
        match e:
            case Op("-", (Op("*") as product, taken)) if self.scope.rank(taken) & Rank.COL:
                return None
        match product:
            case Op("*", (a, b)) if not self.scope.rank(a) & Rank.COL and self.kind(a) is Kind.FLOAT and self.kind(b) is Kind.INT:
                form = affine(b)
                if form is None or not form.coefficient(COLS) or not self._is_linear(form):
                    return None
                if e not in self.memo:
                    c, value = form.coefficient(COLS), self.element(a)
                    rest = self.row(to_expr(form.without(COLS)), Kind.INT)
                    less = f" - {self.row(taken)}" if taken is not None else ""
                    x, y = self.code.temporary(), self.code.temporary()
                    self.before += [
                        f"float {x}[MT][2], {y}[MT][2];",
                        f"FOR_ROWS {y}[t][r] = {value} * {c}.0f;",
                        f"FOR_ROWS {x}[t][r] = {value} * (float)({rest} + {c} * lane_col){less};",
                    ]
                    self.memo[e] = f"({x}[t][r] + {y}[t][r] * (float)(COL))"
                return self.memo[e]
        return None

    def reduce(self, e: Op) -> str:
        """rowmax or rowsum: two chains over a thread's elements, started by the first ones, then the lane quad."""
        if e not in self.memo:
            x, n = self.code.temporary(), self.scope.columns(e.args[0])
            self.columns, outside = n, self.columns
            element = self.element(e.args[0])
            self.columns = outside
            join = "{0} + {1}" if e.fn == "rowsum" else "fmaxf({0}, {1})"
            local = e.fn == "rowsum" and self.into in self.setting.deferred
            close = "" if local else "quad_sum" if e.fn == "rowsum" else "quad_max"
            self.before += [
                f"float {x}[MT][2];",
                "FOR_ROWS {",
                "float u[2];",
                f"UNROLL for (int i = 0; i < {n // 8}; ++i) UNROLL for (int e = 0; e < 2; ++e)"
                f" u[e] = i == 0 ? {element} : {join.format('u[e]', element)};",
                f"{x}[t][r] = {close}({join.format('u[0]', 'u[1]')});",
                "}",
            ]
            self.memo[e] = f"{x}[t][r]"
        return self.memo[e]
